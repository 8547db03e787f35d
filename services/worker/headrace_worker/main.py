"""The process of a worker of both roles."""

from __future__ import annotations

from functools import partial
from typing import Final

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.deadlines import Deadline
from headrace_common.process.run import run_service
from headrace_decode.admission import Capacity
from headrace_decode.main import DecodeServer, load_http_config
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_engine.worker.process import run_workers
from headrace_prefill.prefix_fetch import open_fetcher
from headrace_prefill.pull import open_puller
from headrace_prefill.worker import PrefillWorker
from headrace_worker.config import BothConfig
from headrace_worker.prompt_room import PromptRoom, prompt_blocks

PROG: Final = "headrace-worker"


def main() -> None:
    """Runs until SIGTERM."""
    load = partial(load_http_config, BothConfig, PROG, "HEADRACE_WORKER_", "a worker")
    run_service(PROG, lambda: run_workers("both", load(), BothServer))


class BothServer(DecodeServer):
    """Serves what a decode worker serves, and pulls tasks from routers as a prefill worker does."""

    role = registry_pb2.Member.ROLE_BOTH

    def __init__(self, host: WorkerHost, hosted: HostedWorker[BothConfig]) -> None:
        """Raises ConfigError when the settings do not fit the engine."""
        config, ref, engine = hosted.config, hosted.ref, hosted.engine
        super().__init__(host, hosted)
        self._fetcher = open_fetcher(host, hosted, self.receiving.receiver)
        self._prefill = PrefillWorker(
            ref=ref,
            engine=engine,
            telemetry=host.telemetry.for_worker(ref.worker_id),
            slot_count=config.max_prompts,
            on_ended=partial(host.metrics.transfer_ended, ref.worker_id),
            on_received=self.status_signal.notify,
            prefixes=self._fetcher,
            handovers=hosted.handovers,
            room=PromptRoom(self.capacity, self._prompt_blocks).held,
        )
        self._puller = open_puller(hosted, self._prefill)

    def own_capacity(self, capacity: Capacity) -> Capacity:
        self._prompt_blocks = prompt_blocks(capacity)
        return capacity.without(self._prompt_blocks)

    def routers_changed(self, routers: list[registry_pb2.Member]) -> None:
        super().routers_changed(routers)
        self._puller.set_routers(routers)

    def status(self) -> worker_pb2.WatchStatusResponse:
        """Its own requests. The engine counts the prompts of others too."""
        status = super().status()
        prompts = self._prefill.held_count
        waiting = min(prompts, status.waiting_requests)
        status.waiting_requests -= waiting
        status.running_prompts = min(prompts - waiting, status.running_requests)
        status.running_requests -= status.running_prompts
        return status

    async def finish_drain(self, deadline: Deadline) -> None:
        await self._puller.drain(deadline)
        await super().finish_drain(deadline)
        await self._puller.close()

    async def close(self) -> None:
        await self._puller.close()
        await super().close()
        if self._fetcher is not None:
            await self._fetcher.close()
