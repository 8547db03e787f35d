"""A simulated decode worker: real admission, and steps that all of its answers share.

Between two changes of its requests, the steps have one duration. So the work of the simulation grows with the requests
and not with the tokens.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

from headrace_decode.admission.admission import Admission, Capacity
from headrace_router.workers.table import Load, Worker
from headrace_simulator.cost import CostModel
from headrace_simulator.job import Job
from headrace_simulator.trace import BLOCK_TOKENS
from headrace_simulator.worker_cache import WorkerCache

ADMISSION_BLOCK_TOKENS: Final = 16
# The context grows with every step, and so does the duration of the next.
_STEPS_MAX: Final = 256.0
_FIRST, _LAST = 0, 1


class SimulatedDecodeWorker:
    """`on_change` is called when its load has changed, and `on_gone` when it has drained."""

    def __init__(
        self,
        worker: Worker,
        cache: WorkerCache,
        cost: CostModel,
        on_change: Callable[[SimulatedDecodeWorker], None],
        on_gone: Callable[[SimulatedDecodeWorker], None],
    ) -> None:
        self.worker = worker
        self.cache = cache
        self._cost = cost
        self._on_change = on_change
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._usable_blocks = max(1, cost.kv_tokens // ADMISSION_BLOCK_TOKENS)
        capacity = Capacity(
            usable_blocks=self._usable_blocks,
            block_tokens=ADMISSION_BLOCK_TOKENS,
            max_model_len=worker.max_model_len,
            max_num_seqs=worker.max_num_seqs,
        )
        self._admission = Admission(capacity, self._loop.time)
        self._draining = False
        self._answer_tokens = 0
        # Steps since the start, when they were counted, and their duration since then.
        self._steps = 0.0
        self._counted_s = self._loop.time()
        self._step_s = 0.0
        self._running = 0
        # The sum over running requests of the prompt less the steps at the start: context = this + running x steps.
        self._context_base = 0.0
        self._marks: list[tuple[float, int, int, Job]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def kv_usage(self) -> float:
        """The share of its blocks that are reserved."""
        return self._admission.reserved_blocks / self._usable_blocks

    @property
    def slot_usage(self) -> float:
        """The share of its slots that are taken."""
        return self._admission.request_count / self.worker.max_num_seqs

    @property
    def request_count(self) -> int:
        """Requests that hold blocks."""
        return self._admission.request_count

    def load(self) -> Load:
        """Its load as a router's table has it."""
        return Load(
            requests=self._admission.request_count,
            held_tokens=self._admission.reserved_blocks * ADMISSION_BLOCK_TOKENS,
            total_tokens=self._usable_blocks * ADMISSION_BLOCK_TOKENS,
            draining=self._draining,
        )

    def reserve(self, job: Job) -> int:
        """Reserves blocks, and returns the prompt tokens that its cache has. Raises what Admission.admit does."""
        self._admission.admit(
            job.transfer_id,
            prompt_tokens=job.prompt_tokens,
            max_tokens=job.answer_tokens,
            quarantined_blocks=0,
            priority=job.priority,
        )
        self._answer_tokens += job.answer_tokens
        device, _ = self.cache.depths(job.hashes)
        self._resize_cache()
        self._on_change(self)
        return min(job.prompt_tokens - 1, device * BLOCK_TOKENS)

    def run(self, job: Job) -> None:
        """The KV cache of the prompt is complete: generates the answer."""
        self._count_steps()
        self.cache.use(job.hashes)
        self._running += 1
        self._context_base += job.prompt_tokens - self._steps
        number = job.request.number
        heapq.heappush(self._marks, (self._steps + 1, number, _FIRST, job))
        heapq.heappush(self._marks, (self._steps + job.answer_tokens, number, _LAST, job))
        self._schedule()

    def pause(self, seconds: float) -> None:
        """Computes a prompt itself: its answers wait."""
        self._count_steps()
        self._counted_s = max(self._counted_s, self._loop.time()) + seconds
        self._schedule()

    def release(self, job: Job) -> None:
        """Frees the blocks of a request."""
        self._admission.release(job.transfer_id)
        self._answer_tokens -= job.answer_tokens
        self._resize_cache()
        self._on_change(self)
        self._leave_if_drained()

    def drain(self) -> None:
        """Takes no more requests, and leaves after the last."""
        self._draining = True
        self._on_change(self)
        self._leave_if_drained()

    def _leave_if_drained(self) -> None:
        if self._draining and not self._admission.request_count:
            if self._timer is not None:
                self._timer.cancel()
            self._on_gone(self)

    def _resize_cache(self) -> None:
        tokens = self._usable_blocks * ADMISSION_BLOCK_TOKENS - self._answer_tokens
        self.cache.resize(tokens // BLOCK_TOKENS)

    def _count_steps(self) -> None:
        """Adds the steps since the last count. During a pause, the count lies in the future."""
        now_s = self._loop.time()
        if now_s <= self._counted_s:
            return
        if self._running and self._step_s > 0:
            self._steps += (now_s - self._counted_s) / self._step_s
        self._counted_s = now_s

    def _schedule(self) -> None:
        """The duration of the next steps, and the next time at which something happens."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._running:
            return
        mean_context = self._context_base / self._running + self._steps
        self._step_s = self._cost.step_s(self._running, max(1.0, mean_context))
        steps = min(_STEPS_MAX, max(0.0, self._marks[0][0] - self._steps))
        self._timer = self._loop.call_at(self._counted_s + steps * self._step_s, self._pass_marks)

    def _pass_marks(self) -> None:
        self._timer = None
        self._count_steps()
        now_s = self._loop.time()
        ended: list[Job] = []
        # Rounding leaves a part of a step.
        while self._marks and self._marks[0][0] <= self._steps + 1e-6:
            steps, _, kind, job = heapq.heappop(self._marks)
            if kind == _FIRST:
                job.made_first_token(now_s)
                continue
            self._running -= 1
            self._context_base -= job.prompt_tokens - (steps - job.answer_tokens)
            job.made_last_token(now_s)
            ended.append(job)
        self._schedule()
        for job in ended:
            self.release(job)
