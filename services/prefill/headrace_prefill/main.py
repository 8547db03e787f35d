"""The prefill worker's process."""

from __future__ import annotations

from functools import partial
from typing import Final

import grpc.aio

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.access.roles import Role
from headrace_common.deadlines import Deadline
from headrace_common.limits import message_bytes_max
from headrace_common.process.run import run_service
from headrace_common.process.settings import load_config
from headrace_common.tickets import TicketKeys
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_engine.worker.process import run_workers
from headrace_engine.worker.receiving import KvReceiving
from headrace_engine.worker.serve import RoleServer
from headrace_engine.worker.status import StatusSignal
from headrace_prefill.config import PrefillConfig
from headrace_prefill.prefix_fetch import PrefixFetcher, fetches_prefixes, open_fetcher
from headrace_prefill.pull import open_puller
from headrace_prefill.worker import PrefillWorker

PROG: Final = "headrace-prefill"
_QUIESCE_WAIT_S: Final = 1.0


def main() -> None:
    """Runs until SIGTERM."""
    run_service(
        PROG,
        lambda: run_workers(
            "prefill",
            load_config(PrefillConfig, None, prog=PROG, env_prefix="HEADRACE_PREFILL_"),
            PrefillServer,
        ),
    )


class PrefillServer(RoleServer):
    """Pulls tasks from routers. Beside WorkerService it serves handoff streams, if it fetches prefixes."""

    role = registry_pb2.Member.ROLE_PREFILL

    def __init__(
        self,
        host: WorkerHost,
        hosted: HostedWorker[PrefillConfig],
    ) -> None:
        config, ref, engine = hosted.config, hosted.ref, hosted.engine
        self.status_signal = StatusSignal()
        telemetry = host.telemetry.for_worker(ref.worker_id)
        self._receiving: KvReceiving | None = None
        self._prefixes: PrefixFetcher | None = None
        if fetches_prefixes(config, engine):
            # No ticket permits to fill the blocks of a prefill worker, but those of its own tasks.
            self._receiving = KvReceiving(
                host, hosted, TicketKeys(), senders=(Role.DECODE, Role.PREFILL)
            )
            self.incoming = receiver = self._receiving.receiver
            self._prefixes = open_fetcher(host, hosted, receiver)
            self.descriptor = engine.descriptor
            self.services = ("headrace.kv.v1.HandoffService",)
            self.message_bytes_max = message_bytes_max(0)
        self._worker = PrefillWorker(
            ref=ref,
            engine=engine,
            telemetry=telemetry,
            slot_count=config.max_num_seqs,
            on_ended=partial(host.metrics.transfer_ended, ref.worker_id),
            on_received=self.status_signal.notify,
            prefixes=self._prefixes,
            handovers=hosted.handovers,
        )
        self._puller = open_puller(hosted, self._worker)
        self.on_routers = self._puller.set_routers

    def add_servicers(self, server: grpc.aio.Server) -> None:
        if self._receiving is not None:
            self._receiving.add_servicer(server)

    def status(self) -> worker_pb2.WatchStatusResponse:
        return self._worker.status()

    def start_drain(self, deadline: Deadline) -> None:
        """Tasks are refused only once routers can see that the worker has left."""

    async def finish_drain(self, deadline: Deadline) -> None:
        await self._puller.drain(deadline)
        await self._puller.close()
        if self._receiving is not None:
            await self._receiving.receiver.drain(_QUIESCE_WAIT_S)

    async def close(self) -> None:
        await self._puller.close()
        if self._receiving is not None:
            await self._receiving.close()
        if self._prefixes is not None:
            await self._prefixes.close()
