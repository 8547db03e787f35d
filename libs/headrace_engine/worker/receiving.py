"""The parts of a worker that receive KV from other workers."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import grpc.aio

from headrace.kv.v1 import handoff_pb2_grpc
from headrace_common.access.roles import Role
from headrace_common.tickets import TicketKeys
from headrace_engine.interface import Released
from headrace_engine.worker.config import WorkerConfig
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_engine.worker.transfer_peers import TransferPeers
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.receive.verification import DigestChecks
from headrace_kv.tickets import RouterTickets
from headrace_kv.transport.guard import parse_networks


class KvReceiving:
    """A worker's receiver, its handoff streams, and the hosts that may connect to its transports."""

    def __init__(
        self,
        host: WorkerHost,
        hosted: HostedWorker[WorkerConfig],
        keys: TicketKeys,
        *,
        senders: Collection[Role],
        checks: DigestChecks | None = None,
    ) -> None:
        """`keys` are those of routers. `senders`: see HandoffServicer."""
        config, ref, engine = hosted.config, hosted.ref, hosted.engine
        self.tickets = RouterTickets(
            keys,
            ref,
            engine.descriptor.layout,
            partial(host.metrics.ticket_refused, ref.worker_id),
        )
        self.receiver = Receiver(
            ref=ref,
            layout=engine.descriptor.layout,
            tickets=self.tickets,
            on_released=lambda transfer_id: engine.transfer_event(Released(transfer_id)),
            lease_ttl_s=config.lease_ttl_s,
            quarantine_s=config.quarantine_s,
            broadcast=engine.broadcast,
            checks=checks,
        )
        self._peers = TransferPeers(
            engine.admit_transfer_peers,
            parse_networks(config.transfer_peer_networks),
            # By then the rank's write lease has ended.
            linger_s=2.0 * config.lease_ttl_s,
        )
        self._servicer = HandoffServicer(self.receiver, self._peers.admitted, senders=senders)

    def add_servicer(self, server: grpc.aio.Server) -> None:
        """Serves handoff streams."""
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self._servicer, server)

    async def close(self) -> None:
        """Ends every stream. Quarantined blocks end with the process."""
        self.receiver.close()
        await self._peers.close()
