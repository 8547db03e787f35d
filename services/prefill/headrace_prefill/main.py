"""The prefill worker's process."""

from __future__ import annotations

from functools import partial
from typing import Final

import grpc.aio

from headrace.kv.v1 import handoff_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.deadlines import Deadline
from headrace_common.limits import message_bytes_max
from headrace_common.process.run import run_service
from headrace_common.process.settings import load_config
from headrace_engine.worker.config import served_model
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_engine.worker.process import run_workers
from headrace_engine.worker.serve import RoleServer
from headrace_engine.worker.status import StatusSignal
from headrace_kv.layout.proto import layout_to_proto
from headrace_prefill.config import PrefillConfig
from headrace_prefill.prefix_receiver import PrefixReceiver
from headrace_prefill.pull.puller import TaskPuller
from headrace_prefill.worker import PrefillWorker

PROG: Final = "headrace-prefill"


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
        self._prefixes: PrefixReceiver | None = None
        if config.prefix_fetch_min_tokens:
            self._prefixes = PrefixReceiver(host, hosted)
            self.incoming = self._prefixes.receiver
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
            prefixes=None if self._prefixes is None else self._prefixes.fetcher,
            handovers=hosted.handovers,
        )
        self._puller = TaskPuller(
            config,
            self._worker,
            model=served_model(config, engine),
            layout=layout_to_proto(engine.descriptor.layout),
            adapters=hosted.adapters.announced,
        )
        hosted.adapters.follow(self._puller.set_adapters)
        self.on_routers = self._puller.set_routers

    def add_servicers(self, server: grpc.aio.Server) -> None:
        if self._prefixes is not None:
            servicer = self._prefixes.servicer
            handoff_pb2_grpc.add_HandoffServiceServicer_to_server(servicer, server)

    def status(self) -> worker_pb2.WatchStatusResponse:
        return self._worker.status()

    def start_drain(self, deadline: Deadline) -> None:
        """Tasks are refused only once routers can see that the worker has left."""

    async def finish_drain(self, deadline: Deadline) -> None:
        await self._puller.drain(deadline)
        await self._puller.close()
        if self._prefixes is not None:
            await self._prefixes.drain()

    async def close(self) -> None:
        await self._puller.close()
        if self._prefixes is not None:
            await self._prefixes.close()
