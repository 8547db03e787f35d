"""The parts of a prefill worker that receive prefixes from decode workers."""

from __future__ import annotations

from functools import partial
from typing import Final

from headrace_common.access.roles import Role
from headrace_common.errors import ConfigError
from headrace_common.rpc.channel import open_channel
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_engine.worker.transfer_peers import TransferPeers
from headrace_kv.layout.layout import STATE
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.transport.networks import parse_networks
from headrace_prefill.config import PrefillConfig
from headrace_prefill.prefix_fetch import FetchContext, FetchRecord, PrefixFetcher
from headrace_prefill.prefix_policy import FetchPolicy
from headrace_prefill.prefix_tickets import PrefixTickets

_QUIESCE_WAIT_S: Final = 1.0


class PrefixReceiver:
    """Receives as a decode worker does: a ledger for each transfer, tickets, write leases and quarantines."""

    def __init__(self, host: WorkerHost, hosted: HostedWorker[PrefillConfig]) -> None:
        """Raises ConfigError for a model that has states, because a prefix of it is of no use without its state."""
        config, ref, engine = hosted.config, hosted.ref, hosted.engine
        layout = engine.descriptor.layout
        if any(group.kind == STATE for group in layout.groups):
            raise ConfigError(
                f"prefix_fetch_min_tokens is {config.prefix_fetch_min_tokens}, but the model keeps states, without "
                "which a prefix is of no use: set it to 0",
                metadata={"field": "prefix_fetch_min_tokens"},
            )
        tickets = PrefixTickets(partial(host.metrics.ticket_refused, ref.worker_id))
        self.receiver = Receiver(
            ref=ref,
            layout=layout,
            tickets=tickets,
            on_released=engine.released,
            lease_ttl_s=config.lease_ttl_s,
            quarantine_s=config.quarantine_s,
        )
        self._peers = TransferPeers(
            engine.admit_transfer_peers,
            parse_networks(config.transfer_peer_networks),
            # By then the rank's write lease has ended.
            linger_s=2.0 * config.lease_ttl_s,
        )
        self.servicer = HandoffServicer(self.receiver, self._peers.admitted, sender=Role.DECODE)

        def count(record: FetchRecord) -> None:
            host.metrics.prefix_fetched(ref.worker_id, record.reason, record.token_count)

        self.fetcher = PrefixFetcher(
            FetchContext(
                ref=ref,
                engine=engine,
                receiver=self.receiver,
                tickets=tickets,
                policy=FetchPolicy(config.prefix_fetch_min_tokens),
                timeout_s=config.prefix_fetch_timeout_s,
                on_ended=count,
            ),
            lambda endpoint: open_channel(endpoint, config),
        )

    async def drain(self) -> None:
        """Accepts nothing more. Quarantined blocks end with the process."""
        await self.receiver.drain(_QUIESCE_WAIT_S)

    async def close(self) -> None:
        """Ends every stream, and closes the channels."""
        self.receiver.close()
        await self.fetcher.close()
        await self._peers.close()
