"""The part of the prefill queue for one layout: its workers can hand over to the same decode workers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final

from headrace_common.callers.priority import Priority
from headrace_common.time_model.model import TimeModel, mean_model
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.prefill_queue.task import QueuedTask
from headrace_router.prefill_queue.waiting import (
    AffinityWaits,
    ClassTasks,
    WeightedTurns,
    amount_ahead,
)
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream, WorkersWithCredits

_MEAN_AGE_S: Final = 0.5
_PRICED_TOKENS: Final = 512


class LearnedTimes:
    """What the prefill workers of one layout have learned.

    The mean of hundreds of workers is computed again at an interval, and not for each placement.
    """

    def __init__(self) -> None:
        self._models: dict[WorkerRef, TimeModel] = {}
        self._reported_s = -math.inf
        self._mean = TimeModel()
        self._token_s = 0.0
        self._mean_due_s = -math.inf

    def report(self, ref: WorkerRef, model: TimeModel, now_s: float) -> None:
        """Replaces what a worker has learned. Other links than those of `model` stay."""
        self._reported_s = now_s
        if model.steps.knows_prompts:
            if not self._models:
                self._mean_due_s = -math.inf
            known = self._models.get(ref)
            self._models[ref] = model if known is None else model.with_links_of(known)

    def remove(self, ref: WorkerRef) -> None:
        """Forgets a worker."""
        self._models.pop(ref, None)

    def prefill_s(
        self, tokens: float, prior_tokens: float, now_s: float, age_max_s: float = math.inf
    ) -> float:
        """How long the mean worker computes `tokens` of a prompt after `prior_tokens` of it.

        0 before a worker knows, and when the last report is older than `age_max_s`.
        """
        if now_s - self._reported_s > age_max_s:
            return 0.0
        self._update_mean(now_s)
        return self._mean.step_s(tokens, prior_tokens=prior_tokens) or 0.0

    def token_s(self, now_s: float) -> float:
        """The same for a token of a usual prompt."""
        self._update_mean(now_s)
        return self._token_s

    def _update_mean(self, now_s: float) -> None:
        if now_s >= self._mean_due_s:
            self._mean = mean_model(self._models.values())
            self._token_s = (self._mean.step_s(_PRICED_TOKENS) or 0.0) / _PRICED_TOKENS
            self._mean_due_s = now_s + _MEAN_AGE_S

    def handover_s(self, payload_bytes: float) -> float:
        """How long the mean worker hands bytes over after computing. 0 without bytes, and while unknown."""
        return (self._mean.handover_s(payload_bytes) or 0.0) if payload_bytes else 0.0

    def handover_tokens(
        self, ref: WorkerRef, payload_bytes: float, link: str, now_s: float
    ) -> float:
        """How many tokens are computed in the time of a worker's hand-over to decode worker `link`. 0 while unknown."""
        model, token_s = self._models.get(ref), self.token_s(now_s)
        if model is None or token_s <= 0:
            return 0.0
        return (model.handover_s(payload_bytes, link) or 0.0) / token_s


# To wait for a worker is worth it when that saves at least this share of the prompt.
_SAVED_SHARE_MIN: Final = 0.25


class QueueGroup:
    """Assigns waiting tasks to workers with credits.

    A task that waits is either in a lane, or waits for workers that have its prefix. Classes take turns by weight, and
    so do the tenants of a class.
    """

    def __init__(
        self,
        layout: KvLayout,
        token_bytes: float,
        prefix_wait_s: float,
        tenant_weight: Callable[[str], float],
    ) -> None:
        self.layout = layout
        """The layout fingerprint that the group's workers share."""
        self.token_bytes = token_bytes
        """KV of one token, over all ranks."""
        self.worker_streams: dict[WorkerRef, PrefillWorkerStream] = {}
        """The workers that take tasks."""
        self.times = LearnedTimes()
        """What they have learned."""
        self.expected_tasks = 0
        self._running_tasks = 0
        self._running_tokens = 0
        self._open_streams = 0
        self._unrestricted_count = 0
        self._prefix_wait_s = prefix_wait_s
        self._waiting = {priority: ClassTasks(tenant_weight) for priority in Priority}
        self._turns = WeightedTurns[Priority](lambda priority: priority.weight)
        self._affinity_waits = AffinityWaits()
        self._with_credits = WorkersWithCredits()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(len(waiting.tasks) for waiting in self._waiting.values())

    def __iter__(self) -> Iterator[QueuedTask]:
        for waiting in self._waiting.values():
            yield from waiting.tasks.values()

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of all tasks that wait."""
        return sum(waiting.tokens for waiting in self._waiting.values())

    def depth_of(self, priority: Priority) -> int:
        """The number of tasks of a class that wait."""
        return len(self._waiting[priority].tasks)

    def oldest_age_of(self, priority: Priority) -> float:
        """How long the oldest task of a class has waited; 0 without tasks."""
        return self._waiting[priority].oldest_age_s

    def wait_s(self, priority: Priority = Priority.NORMAL, tenant: str | None = None) -> float:
        """How long a task of a tenant that came now would wait, after all expected tasks of its own.

        Other classes and tenants get their shares meanwhile. Without a tenant, it waits for all tasks of its class.
        """
        overflow_tasks = self.expected_tasks - self._with_credits.credits
        if overflow_tasks < 0:
            return 0.0
        # Expected tasks that find a credit count as running, the others as queued.
        overflow = overflow_tasks / self.expected_tasks if self.expected_tasks else 0.0
        own, task_tokens = self._waiting[priority], self._mean_task_tokens()
        ahead = amount_ahead(
            own.tokens_before_end(tenant, task_tokens, overflow),
            priority.weight,
            [
                (waiting.tokens_with_expected(overflow), other.weight)
                for other, waiting in self._waiting.items()
                if other is not priority
            ],
        )
        task_s = self.times.prefill_s(task_tokens, 0, time.monotonic()) if task_tokens else 0.0
        compute_s = task_s * ahead / (task_tokens or 1.0) / max(1, self._unrestricted_count)
        return max(compute_s, own.oldest_age_s if tenant is None else own.oldest_age_of(tenant))

    def _mean_task_tokens(self) -> float:
        """Tokens to compute of the mean task that runs or waits, else of the mean expected one; 0 without any."""
        waiting = self._waiting.values()
        tasks = self._running_tasks + len(self)
        if tasks:
            tokens = self._running_tokens + sum(one.missing_tokens for one in waiting)
            return tokens / tasks
        expected = sum(one.tokens_with_expected(1.0) for one in waiting)
        return expected / self.expected_tasks if self.expected_tasks else 0.0

    @contextmanager
    def expect_task(self, tokens: int, priority: Priority, tenant: str) -> Iterator[None]:
        """Counts a task that will be queued soon. It counts for `wait_s` within the block."""
        self.expected_tasks += 1
        self._waiting[priority].expect(tenant, tokens)
        try:
            yield
        finally:
            self.expected_tasks -= 1
            self._waiting[priority].expect(tenant, -tokens)

    def has_eligible_worker(self, queued: QueuedTask) -> bool:
        """Whether any worker may take the task, with or without credits."""
        return any(ref not in queued.avoid for ref in self.worker_streams)

    def exclude_unfit_workers(self, queued: QueuedTask) -> None:
        """A task that is about to be added avoids the workers that may not take it."""
        if not queued.fits_all:
            queued.exclude(
                ref
                for ref, stream in self.worker_streams.items()
                if not queued.fits(ref, stream.usable_adapters)
            )

    def tasks_before(self, queued: QueuedTask) -> int:
        """The number of tasks that are handed out before this one. An estimate beside other classes and tenants."""
        priority = queued.priority
        own = self._waiting[priority].tasks_before(queued)
        others = [
            (len(waiting.tasks), other.weight)
            for other, waiting in self._waiting.items()
            if other is not priority
        ]
        return int(amount_ahead(own + 1, priority.weight, others)) - 1

    def add(self, queued: QueuedTask) -> None:
        """Adds a task that is new or was returned, and assigns it if it can."""
        waiting = self._waiting[queued.priority]
        if not waiting.tasks:
            self._turns.became_busy(queued.priority)
        waiting.add(queued)
        self._assign_or_queue(queued)

    def remove(self, queued: QueuedTask) -> None:
        """Removes a task. Does nothing when it does not wait here."""
        waiting = self._waiting[queued.priority]
        if queued.number not in waiting.tasks:
            return
        if queued in self._affinity_waits:
            self._affinity_waits.remove(queued)
        else:
            waiting.lanes.remove(queued)
        self._stop_waiting(queued)

    def add_worker(self, stream: PrefillWorkerStream) -> None:
        """Adds a worker, as yet without credits."""
        self.worker_streams[stream.ref] = stream
        self._open_streams += 1
        self._count_unrestricted()
        for queued in self:
            if not queued.fits(stream.ref, stream.usable_adapters):
                queued.exclude((stream.ref,))
            if stream.ref in queued.avoid and queued not in self._affinity_waits:
                self._waiting[queued.priority].lanes.remove(queued)
                self._add_to_lane(queued)

    def retire_worker(self, stream: PrefillWorkerStream) -> tuple[QueuedTask, ...]:
        """Assigns the worker no more tasks. Removes and returns the tasks that no other worker may take."""
        self.worker_streams.pop(stream.ref, None)
        self._count_unrestricted()
        stream.retire()
        self._with_credits.update(stream)
        for queued in self._affinity_waits.tasks_for(stream.ref):
            self._affinity_waits.remove(queued)
            self._assign_or_queue(queued)
        stranded = tuple(queued for queued in self if queued.avoid >= self.worker_streams.keys())
        for queued in stranded:
            self.remove(queued)
        self._offer_credits()
        return stranded

    def restrict(self, refs: Collection[WorkerRef]) -> None:
        """From now on, these workers get only tasks that no other worker may take."""
        for ref, stream in self.worker_streams.items():
            stream.restrict(ref in refs)
        self._count_unrestricted()
        self._offer_credits()

    def close_stream(self) -> bool:
        """The stream of a retired worker has ended. Returns whether it was the last of the group."""
        self._open_streams -= 1
        return not self._open_streams

    def add_credits(self, stream: PrefillWorkerStream, task_count: int) -> None:
        """Assigns tasks to a worker that can take more. Raises what PrefillWorkerStream.add_credits does."""
        stream.add_credits(task_count)
        now_s = time.monotonic()
        while stream.credits and (queued := self._next_for(stream)) is not None:
            waits = queued in self._affinity_waits
            better = () if waits else self._workers_worth_waiting_for(queued, stream, now_s)
            if better:
                self._waiting[queued.priority].lanes.remove(queued)
                self._wait_for_affinity(queued, better, now_s)
            else:
                self.remove(queued)
                self._send(queued, stream, now_s)
        self._with_credits.update(stream)

    def _offer_credits(self) -> None:
        """Assigns tasks that other workers than before may get now."""
        for stream in tuple(self.worker_streams.values()):
            if stream.credits:
                self.add_credits(stream, 0)

    def _count_unrestricted(self) -> None:
        streams = self.worker_streams.values()
        self._unrestricted_count = sum(not stream.restricted for stream in streams)

    def _is_left_to_restricted(self, excluded: Collection[WorkerRef]) -> bool:
        """Whether only restricted workers may take a task that these may not get."""
        streams = self.worker_streams.items()
        return all(stream.restricted or ref in excluded for ref, stream in streams)

    def task_ended(self, stream: PrefillWorkerStream, queued: QueuedTask) -> None:
        """A worker no longer has a task."""
        stream.task_ended(queued)
        self._running_tasks -= 1
        self._running_tokens -= queued.counted_tokens
        self._with_credits.update(stream)

    def task_succeeded(
        self, stream: PrefillWorkerStream, queued: QueuedTask, cached_tokens: int
    ) -> None:
        """A worker completed a task, of which it had `cached_tokens`."""
        self.task_ended(stream, queued)
        self._correct(queued, max(1, queued.tokens - cached_tokens))

    def task_returned(self, queued: QueuedTask) -> None:
        """A worker has computed nothing of a task that it no longer has."""
        self._correct(queued, 0)

    def _assign_or_queue(self, queued: QueuedTask) -> None:
        """Sends a task to a worker with credits, or lets it wait for a better one, or adds it to a lane."""
        restricted = self._is_left_to_restricted(queued.avoid)
        stream = self._with_credits.best_for(queued, restricted=restricted)
        if stream is None:
            self._add_to_lane(queued)
            return
        now_s = time.monotonic()
        better = self._workers_worth_waiting_for(queued, stream, now_s)
        if better:
            self._wait_for_affinity(queued, better, now_s)
        else:
            self._stop_waiting(queued)
            self._send(queued, stream, now_s)
            self._with_credits.update(stream)

    def _stop_waiting(self, queued: QueuedTask) -> None:
        """A task that is in no lane waits no more."""
        waiting = self._waiting[queued.priority]
        waiting.remove(queued)
        if not waiting.tasks:
            self._turns.became_idle(queued.priority)

    def _send(self, queued: QueuedTask, stream: PrefillWorkerStream, now_s: float) -> None:
        stream.send_task(queued, now_s)
        self._turns.handed_out(queued.priority, queued.counted_tokens)
        self._waiting[queued.priority].handed_out(queued)
        self._running_tasks += 1
        self._running_tokens += queued.counted_tokens

    def _correct(self, queued: QueuedTask, computed_tokens: int) -> None:
        """A worker has computed so many tokens of a task that was handed out."""
        tokens = computed_tokens - queued.counted_tokens
        self._turns.corrected(queued.priority, tokens)
        self._waiting[queued.priority].corrected(queued, tokens)

    def _workers_worth_waiting_for(
        self, queued: QueuedTask, stream: PrefillWorkerStream, now_s: float
    ) -> tuple[WorkerRef, ...]:
        """Workers that have far more of the prompt cached than `stream`, and will soon have room."""
        if not queued.may_wait or self._prefix_wait_s <= 0:
            return ()
        cached_tokens_min = queued.cached_tokens(stream.ref) + max(
            1.0, _SAVED_SHARE_MIN * queued.tokens
        )
        return tuple(
            ref
            for ref in queued.preferred_workers
            if queued.cached_tokens(ref) >= cached_tokens_min
            and ref not in queued.avoid
            and (better := self.worker_streams.get(ref)) is not None
            and not better.restricted
            and not better.may_take(queued.tenant)
            and better.has_room_within(
                self._prefix_wait_s,
                tasks_ahead=self._affinity_waits.count_for(ref),
                token_s=self.times.token_s(now_s),
                now_s=now_s,
            )
        )

    def _wait_for_affinity(
        self, queued: QueuedTask, refs: tuple[WorkerRef, ...], now_s: float
    ) -> None:
        queued.affinity_wait_started()
        self._affinity_waits.add(queued, refs, now_s + self._prefix_wait_s)
        self._start_timer()

    def _start_timer(self) -> None:
        end_s = self._affinity_waits.next_end_s
        if self._timer is None and end_s is not None:
            delay_s = max(0.0, end_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_waits)

    def _end_waits(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        while (queued := self._affinity_waits.remove_ended(now_s)) is not None:
            self._assign_or_queue(queued)
        self._start_timer()

    def _add_to_lane(self, queued: QueuedTask) -> None:
        # Absent workers do not split lanes: `avoid` may name many that have left.
        excluded = frozenset(ref for ref in queued.avoid if ref in self.worker_streams)
        self._waiting[queued.priority].lanes.add(queued, excluded)

    def _next_for(self, stream: PrefillWorkerStream) -> QueuedTask | None:
        """The first task that the worker may get, of the class that is next."""
        firsts = (self._first_of(priority, stream) for priority in Priority)
        return min(
            (queued for queued in firsts if queued is not None),
            key=lambda queued: (self._turns.start(queued.priority), queued.priority),
            default=None,
        )

    def _first_of(self, priority: Priority, stream: PrefillWorkerStream) -> QueuedTask | None:
        tasks = self._waiting[priority]
        if not tasks.tasks:
            return None
        # Tasks that wait for a worker with their prefix go on soon.
        found = [
            queued
            for queued in self._affinity_waits.for_worker(stream.ref, priority)
            if stream.may_take(queued.tenant) and not stream.restricted
        ]
        first = tasks.lanes.first_for(
            stream.ref,
            stream.tenants if stream.keeps_credit else (),
            self._is_left_to_restricted if stream.restricted else None,
        )
        if first is not None:
            found.append(first)
        return min(found, key=tasks.position, default=None)
