"""A simulated prefill worker: pulls from the real queue and computes one prompt after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import Draining
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_simulator.cost import CostModel
from headrace_simulator.job import Job
from headrace_simulator.trace import BLOCK_TOKENS
from headrace_simulator.worker_cache import WorkerCache

# One prompt is computed, and the next one waits at the worker.
_CREDITS: Final = 2


class SimulatedPrefillWorker:
    """`jobs` has the jobs by transfer id. `on_gone` is called when the worker has drained."""

    def __init__(
        self,
        ref: WorkerRef,
        queue: PrefillQueue,
        cache: WorkerCache,
        cost: CostModel,
        jobs: Mapping[str, Job],
        on_gone: Callable[[SimulatedPrefillWorker], None],
    ) -> None:
        self.ref = ref
        self._queue = queue
        self._cache = cache
        self._cost = cost
        self._jobs = jobs
        self._on_gone = on_gone
        self._computing = False
        self._draining = False

    def start(self, model: str, layout: KvLayout) -> None:
        """Joins the queue."""
        self._stream = self._queue.add_worker(self.ref, model, layout)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._queue.add_credits(self._stream, _CREDITS)

    def drain(self) -> None:
        """Returns the prompts that it has not begun, completes the one that it computes, and leaves."""
        self._draining = True
        while self._stream.outbox.depth:
            self._reject(self._stream.outbox.get_nowait())
        self._leave_if_drained()

    async def close(self) -> None:
        """Stops at once."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            message = await self._stream.outbox.get()
            if not message.HasField("task"):
                continue
            if self._draining:
                self._reject(message)
                continue
            self._computing = True
            await self._compute(message.task.transfer_id)
            self._computing = False
            if self._leave_if_drained():
                return

    async def _compute(self, transfer_id: str) -> None:
        job = self._jobs[transfer_id]
        self._queue.task_started(self._stream, transfer_id)
        cached_tokens, compute_s = computed(job, self._cache, self._cost)
        start_s = asyncio.get_running_loop().time()
        await asyncio.sleep(compute_s)
        self._cache.use(job.hashes)
        job.prefilled(cached_tokens, compute_s)
        done = prefill_pb2.TaskDone(transfer_id=transfer_id, cached_tokens=cached_tokens)
        done.times.compute_start_us = int(start_s * 1e6)
        done.times.compute_end_us = int((start_s + compute_s) * 1e6)
        self._queue.task_ended(self._stream, done)
        if not self._draining:
            self._queue.add_credits(self._stream, 1)

    def _reject(self, message: prefill_pb2.PullResponse) -> None:
        if message.HasField("task"):
            done = prefill_pb2.TaskDone(
                transfer_id=message.task.transfer_id, reason=Draining.reason, detail="it drains"
            )
            self._queue.task_ended(self._stream, done)

    def _leave_if_drained(self) -> bool:
        if self._computing or not self._draining:
            return False
        self._queue.remove_worker(self._stream)
        self._task.cancel()
        self._on_gone(self)
        return True


def computed(job: Job, cache: WorkerCache, cost: CostModel) -> tuple[int, float]:
    """The prompt tokens that a worker has cached, and the time to compute the others.

    Blocks in main memory are loaded if that is faster than to compute them. The last token is always computed.
    """
    whole = job.prompt_tokens - 1
    device, reached = (min(whole, blocks * BLOCK_TOKENS) for blocks in cache.depths(job.hashes))
    compute_s = cost.prefill_s(job.prompt_tokens, device)
    if reached > device:
        loaded_s = cost.prefill_s(job.prompt_tokens, reached) + cost.host_load_s(reached - device)
        if loaded_s < compute_s:
            return reached, loaded_s
    return device, compute_s
