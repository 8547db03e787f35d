"""Simulated workers: real admission and queue, computing that takes time only, and a prefix cache.

Changes of its prefix cache become events of a real PrefixEventLog, as those of an engine do.

Between two changes of a decode worker's requests, the steps have one duration. So the work of the simulation grows with
the requests and not with the tokens.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import Draining
from headrace_common.time_model.model import Step, StepLearner
from headrace_common.time_model.proto import step_times_to_proto
from headrace_decode.admission.admission import BlockAdmission, Capacity
from headrace_engine.prefix_event_log import PrefixEventLog
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_kv.prefix.events import KvEvent, Tier
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.workers.table import Load, Worker
from headrace_simulator.cost import CostModel
from headrace_simulator.job import Job
from headrace_simulator.trace import BLOCK_TOKENS


class WorkerCache:
    """The blocks in KV memory, and with `host_blocks` those that it has evicted to main memory.

    `announce` gets every event. A block leaves before its parent, because a use of a block is one of its parents too.
    """

    def __init__(
        self,
        ref: WorkerRef,
        device_blocks: int,
        host_blocks: int,
        announce: Callable[[KvEvent], object],
    ) -> None:
        self._device_blocks = device_blocks
        self._host_blocks = host_blocks
        self._announce = announce
        # Blocks and their parents, the least recently used first.
        self._device: OrderedDict[int, int | None] = OrderedDict()
        self._host: OrderedDict[int, int | None] = OrderedDict()
        tiers = (Tier.DEVICE, Tier.HOST) if host_blocks else (Tier.DEVICE,)
        self._log = PrefixEventLog(ref.incarnation, tiers)
        self._send(self._log.snapshot())

    def __len__(self) -> int:
        return len(self._device)

    def depths(self, hashes: Sequence[int]) -> tuple[int, int]:
        """How many blocks of a prompt, from the first on, are in KV memory, and in any tier."""
        device = 0
        while device < len(hashes) and hashes[device] in self._device:
            device += 1
        reached = device
        while reached < len(hashes) and (
            hashes[reached] in self._device or hashes[reached] in self._host
        ):
            reached += 1
        return device, reached

    def use(self, hashes: Sequence[int]) -> None:
        """All blocks of a prompt are in KV memory now."""
        if not hashes:
            return
        device, _ = self.depths(hashes)
        fresh = hashes[device:]
        parents: list[int | None] = [None, *hashes[:-1]]
        for block, parent in zip(fresh, parents[device:], strict=True):
            self._device[block] = parent
        for block in reversed(hashes):
            self._device.move_to_end(block)
            if block in self._host:
                self._host.move_to_end(block)
        if fresh:
            self._send(self._log.stored(parents[device], fresh))
        self._evict()

    def resize(self, device_blocks: int) -> None:
        """KV memory has room for so many blocks of prompts now."""
        self._device_blocks = max(0, device_blocks)
        self._evict()

    def _evict(self) -> None:
        evicted = [
            self._device.popitem(last=False)
            for _ in range(max(0, len(self._device) - self._device_blocks))
        ]
        if not evicted:
            return
        if self._host_blocks:
            for block, parent in evicted:
                self._host[block] = parent
                self._host.move_to_end(block)
            chains = [(parent, [block]) for block, parent in reversed(evicted)]
            self._send(self._log.stored_chains(chains, Tier.HOST))
        self._send(self._log.removed([block for block, _ in evicted]))
        if excess := len(self._host) - self._host_blocks:
            dropped = [self._host.popitem(last=False)[0] for _ in range(max(0, excess))]
            self._send(self._log.removed(dropped, Tier.HOST))

    def _send(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            self._announce(event)


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
        self._learner = StepLearner()
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
        await asyncio.sleep(compute_s)
        self._cache.use(job.hashes)
        job.prefilled(cached_tokens, compute_s)
        done = prefill_pb2.TaskDone(transfer_id=transfer_id, cached_tokens=cached_tokens)
        missing_tokens = max(1, job.prompt_tokens - cached_tokens)
        attended_tokens = missing_tokens * (cached_tokens + missing_tokens / 2)
        self._learner.observe(Step(missing_tokens, attended_tokens), compute_s)
        done.time_model.steps.CopyFrom(step_times_to_proto(self._learner.times))
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
        self._admission = BlockAdmission(capacity, self._loop.time)
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
        """Reserves blocks, and returns the prompt tokens that its cache has. Raises what BlockAdmission.admit does."""
        self._admission.admit(
            job.transfer_id,
            prompt_tokens=job.prompt_tokens,
            max_tokens=job.answer_tokens,
            quarantined_blocks=0,
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
