"""Simulated workers: real admission, queue and step budget, steps that take time only, and a prefix cache.

Changes of its prefix cache become events of a real PrefixEventLog, as those of an engine do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import Draining
from headrace_common.time_model.model import TimeModel, step_times_to_proto
from headrace_decode.admission import BlockAdmission, Capacity
from headrace_engine.prefix_event_log import PrefixEventLog
from headrace_engine.step_budget import TokenBounds
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import KvEvent, Tier
from headrace_planner.observation import PlannedRole
from headrace_planner.settings import WorkerProfile
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.workers.table import Load, PromptQueue, Worker
from headrace_simulator.engine import EnginePrompt, SimulatedEngine
from headrace_simulator.job import Job
from headrace_simulator.trace import BLOCK_TOKENS
from headrace_worker.prompt_room import prompt_blocks


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


_CREDITS: Final = {PlannedRole.PREFILL: 4, PlannedRole.BOTH: 8}
"""Prompts of others that a worker has at once, by the defaults of the services."""
ADMISSION_BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all workers have in common. `jobs` has the jobs by transfer id. A bound of 0 is none.

    `on_change` is called when the load of a worker has changed, and `on_gone` when it has drained.
    """

    profile: WorkerProfile
    queue: PrefillQueue
    jobs: Mapping[str, Job]
    ttft_s: float
    tpot_s: float
    prompt_tokens_max: int
    orders_prompts: bool
    on_change: Callable[[SimulatedWorker], None]
    on_gone: Callable[[SimulatedWorker], None]


class SimulatedWorker:
    """One engine. Its role decides whether it computes prompts of the queue, generates, or both."""

    def __init__(
        self, worker: Worker, role: PlannedRole, cache: WorkerCache, around: Surroundings
    ) -> None:
        self.worker = worker
        self.role = role
        self.cache = cache
        self.prompts = PromptQueue()
        """The prompts that the router has placed on it."""
        self._around = around
        self._loop = asyncio.get_running_loop()
        profile = around.profile
        self._times = TimeModel(profile.steps, profile.handovers)
        self._engine = SimulatedEngine(
            profile, around.tpot_s, self.release, orders_prompts=around.orders_prompts
        )
        capacity = Capacity(
            usable_blocks=max(1, profile.kv_tokens // ADMISSION_BLOCK_TOKENS),
            block_tokens=ADMISSION_BLOCK_TOKENS,
            max_model_len=worker.max_model_len,
            max_num_seqs=worker.max_num_seqs,
        )
        if role is PlannedRole.BOTH:
            longest = replace(capacity, max_model_len=around.prompt_tokens_max)
            capacity = capacity.without(prompt_blocks(longest))
        self._usable_blocks = capacity.usable_blocks
        self._admission = BlockAdmission(capacity, self._loop.time)
        self._answer_tokens = 0
        self._pulled = 0
        self._draining = False
        self._pulling: asyncio.Task[None] | None = None
        if role is not PlannedRole.DECODE:
            self._stream = around.queue.add_worker(worker.ref, worker.model, worker.layout)
            self._pulling = self._loop.create_task(self._pull())
            around.queue.add_credits(self._stream, _CREDITS[role])

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
        """Requests that hold blocks, and prompts of others."""
        return self._admission.request_count + self._pulled

    @property
    def waiting_prompts(self) -> int:
        """Prompts that wait for others on the same worker."""
        return self._engine.waiting_prompts

    def load(self) -> Load:
        """Its load as a router's table has it."""
        return Load(
            requests=self._admission.request_count,
            held_tokens=self._admission.reserved_blocks * ADMISSION_BLOCK_TOKENS,
            total_tokens=self._usable_blocks * ADMISSION_BLOCK_TOKENS,
            draining=self._draining,
            prompts=self.prompts.work,
            times=self._times,
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
        self._around.on_change(self)
        return min(job.prompt_tokens - 1, device * BLOCK_TOKENS)

    def compute(self, job: Job, computed: Callable[[], None], *, answered: bool = False) -> None:
        """Computes the prompt, and generates the answer if it is `answered` here.

        Blocks in main memory are loaded where that is faster.
        """
        profile, whole = self._around.profile, job.prompt_tokens - 1
        cached, reached = (min(whole, one * BLOCK_TOKENS) for one in self.cache.depths(job.hashes))
        load_s = (reached - cached) * profile.host_load_s_per_token
        saved_s = profile.prompt_s(whole - cached, cached) - profile.prompt_s(
            whole - reached, reached
        )
        if reached == cached or load_s >= saved_s:
            reached, load_s = cached, 0.0

        def ended() -> None:
            self.cache.use(job.hashes)
            job.prefilled(reached)
            computed()

        ttft_s = self._around.ttft_s
        due_s = job.arrival_s + ttft_s if ttft_s else 0.0
        prompt = EnginePrompt(
            whole - reached,
            reached,
            TokenBounds(due_s, ttft_s, self._around.tpot_s),
            self._loop.time(),
            ended,
            job if answered else None,
        )
        if load_s:
            self._loop.call_later(load_s, self._engine.add_prompt, prompt)
        else:
            self._engine.add_prompt(prompt)

    def generate(self, job: Job) -> None:
        """The KV cache of the prompt has come: generates what is left of the answer."""
        self.cache.use(job.hashes)
        if job.has_first_token and job.answer_tokens == 1:
            job.made_last_token(job.first_token_s)
            self.release(job)
        else:
            self._engine.add_answer(job)

    def release(self, job: Job) -> None:
        """Frees the blocks of a request."""
        self._admission.release(job.transfer_id)
        self._answer_tokens -= job.answer_tokens
        self._resize_cache()
        self._around.on_change(self)
        self._leave_if_drained()

    def drain(self) -> None:
        """Takes no more requests and prompts, and leaves after the last."""
        self._draining = True
        self._around.on_change(self)
        self._leave_if_drained()

    def _resize_cache(self) -> None:
        tokens = self._usable_blocks * ADMISSION_BLOCK_TOKENS - self._answer_tokens
        self.cache.resize(tokens // BLOCK_TOKENS)

    async def _pull(self) -> None:
        while True:
            message = await self._stream.outbox.get()
            if not message.HasField("task"):
                continue
            transfer_id = message.task.transfer_id
            if self._draining:
                self._end_task(transfer_id, Draining("it drains"))
            else:
                self._around.queue.task_started(self._stream, transfer_id)
                self._pulled += 1
                self.compute(self._around.jobs[transfer_id], partial(self._computed, transfer_id))

    def _computed(self, transfer_id: str) -> None:
        self._end_task(transfer_id)
        self._pulled -= 1
        if not self._draining:
            self._around.queue.add_credits(self._stream, 1)
        self._leave_if_drained()

    def _end_task(self, transfer_id: str, error: Draining | None = None) -> None:
        done = prefill_pb2.TaskDone(transfer_id=transfer_id)
        if error is not None:
            done.reason, done.detail = error.reason, error.detail
        else:
            done.cached_tokens = self._around.jobs[transfer_id].cached_tokens
            done.time_model.steps.CopyFrom(step_times_to_proto(self._around.profile.steps))
        self._around.queue.task_ended(self._stream, done)

    def _leave_if_drained(self) -> None:
        if not self._draining or self.request_count:
            return
        if self._pulling is not None:
            self._around.queue.remove_worker(self._stream)
            self._pulling.cancel()
        self._around.on_gone(self)
