"""The part of the prefill queue for one layout: its workers can hand over to the same decode workers."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Collection
from typing import Final

from sortedcontainers import SortedDict

from headrace_common.callers.priority import Priority
from headrace_common.time_model.model import TimeModel, mean_model
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.costs import best_parts
from headrace_router.prefill_queue.task import QueuedTask, TaskOrder
from headrace_router.prefill_queue.waiting import GroupTasks
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream, WorkersWithCredits
from headrace_router.workers.table import time_values

_MEAN_AGE_S: Final = 0.5
_PRICED_TOKENS: Final = 512
# Each part is a task of its own, with all tokens before it.
_PARTS_MAX: Final = 16
_NO_TASKS: Final[SortedDict[TaskOrder, QueuedTask]] = SortedDict()


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

    def of(self, ref: WorkerRef) -> TimeModel | None:
        """What a worker has learned. None: nothing yet."""
        return self._models.get(ref)

    def remove(self, ref: WorkerRef) -> None:
        """Forgets a worker."""
        self._models.pop(ref, None)

    def prefill_s(
        self, tokens: float, prior_tokens: float, now_s: float, age_max_s: float = math.inf
    ) -> float:
        """How long the mean worker computes `tokens` of a prompt after `prior_tokens` of it.

        0 before a worker knows, and when the last report is older than `age_max_s`.
        """
        return self.mean(now_s, age_max_s).step_s(tokens, prior_tokens=prior_tokens) or 0.0

    def mean(self, now_s: float, age_max_s: float = math.inf) -> TimeModel:
        """What the mean worker has learned. Nothing, when the last report is older than `age_max_s`."""
        if now_s - self._reported_s > age_max_s:
            return TimeModel()
        self._update_mean(now_s)
        return self._mean

    def token_s(self, now_s: float) -> float:
        """How long the mean worker computes a token of a usual prompt. 0 before a worker knows."""
        self._update_mean(now_s)
        return self._token_s

    def _update_mean(self, now_s: float) -> None:
        if now_s >= self._mean_due_s:
            self._mean = mean_model(self._models.values())
            self._token_s = (self._mean.step_s(_PRICED_TOKENS) or 0.0) / _PRICED_TOKENS
            self._mean_due_s = now_s + _MEAN_AGE_S

    def handover_tokens(
        self, ref: WorkerRef, payload_bytes: float, link: str, now_s: float
    ) -> float:
        """How many tokens are computed in the time of a worker's hand-over to decode worker `link`. 0 while unknown."""
        model, token_s = self._models.get(ref), self.token_s(now_s)
        if model is None or token_s < 1e-9:
            return 0.0
        return (model.handover_s(payload_bytes, link) or 0.0) / token_s


class AffinityWaits:
    """Tasks that wait for one of a few workers that have their prefix, each for at most `wait_s`, and once."""

    def __init__(self, wait_s: float, on_end: Callable[[QueuedTask], None]) -> None:
        """`on_end` gets each task with a wait that has ended. It must remove it."""
        self.wait_s = wait_s
        self._on_end = on_end
        # In the order in which they end.
        self._waits: dict[int, tuple[float, tuple[WorkerRef, ...], QueuedTask]] = {}
        self._by_worker: dict[tuple[WorkerRef, Priority], SortedDict[TaskOrder, QueuedTask]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, queued: QueuedTask) -> bool:
        return queued.number in self._waits

    def add(self, queued: QueuedTask, refs: tuple[WorkerRef, ...], now_s: float) -> None:
        """A task waits for these workers from now on."""
        queued.affinity_wait_started()
        self._waits[queued.number] = now_s + self.wait_s, refs, queued
        for ref in refs:
            waiting = self._by_worker.setdefault((ref, queued.priority), SortedDict())
            waiting[queued.order] = queued
        self._start_timer()

    def remove(self, queued: QueuedTask) -> None:
        """Removes a task that waits."""
        _, refs, _ = self._waits.pop(queued.number)
        for ref in refs:
            waiting = self._by_worker[ref, queued.priority]
            del waiting[queued.order]
            if not waiting:
                del self._by_worker[ref, queued.priority]

    def count_for(self, ref: WorkerRef) -> int:
        """The number of tasks that wait for this worker."""
        return sum(len(self._by_worker.get((ref, priority), ())) for priority in Priority)

    def for_worker(self, ref: WorkerRef, priority: Priority) -> Collection[QueuedTask]:
        """The tasks of a class that wait for this worker, in order: no more than the worker has tasks."""
        return self._by_worker.get((ref, priority), _NO_TASKS).values()  # type: ignore[no-any-return]

    def _start_timer(self) -> None:
        if self._timer is None and self._waits:
            end_s, *_ = next(iter(self._waits.values()))
            delay_s = max(0.0, end_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_waits)

    def _end_waits(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        ended = [queued for end_s, _, queued in self._waits.values() if end_s <= now_s]
        for queued in ended:
            self._on_end(queued)
        self._start_timer()


# To wait for a worker is worth it when that saves at least this share of the prompt.
_SAVED_SHARE_MIN: Final = 0.25


class QueueGroup:
    """Assigns waiting tasks to workers with credits.

    A task that waits is either in a lane, or waits for workers that have its prefix.
    """

    def __init__(
        self,
        layout: KvLayout,
        token_bytes: float,
        prefix_wait_s: float,
        tenant_weight: Callable[[str], float],
        on_wait_end: Callable[[QueuedTask], None],
    ) -> None:
        """`on_wait_end` gets a task for `end_wait`."""
        self.layout = layout
        """The layout fingerprint that the group's workers share."""
        self.token_bytes = token_bytes
        """KV of one token, over all ranks."""
        self.worker_streams: dict[WorkerRef, PrefillWorkerStream] = {}
        """The workers that take tasks."""
        self.times = LearnedTimes()
        """What they have learned."""
        self.tasks = GroupTasks(tenant_weight)
        self._open_streams = 0
        self._unrestricted_count = 0
        self._affinity_waits = AffinityWaits(prefix_wait_s, on_wait_end)
        self._with_credits = WorkersWithCredits()

    def wait_s(self, priority: Priority = Priority.NORMAL, tenant: str | None = None) -> float:
        """How long a task of a tenant that came now would wait, after all expected tasks of its own.

        Other classes and tenants get their shares meanwhile. Without a tenant, it waits for all tasks of its class.
        """
        tasks = self.tasks
        overflow_tasks = tasks.expected - self._with_credits.credits
        if overflow_tasks < 0:
            return 0.0
        # Expected tasks that find a credit count as running, the others as queued.
        overflow = overflow_tasks / tasks.expected if tasks.expected else 0.0
        task_tokens = tasks.mean_tokens()
        ahead = tasks.tokens_ahead(priority, tenant, task_tokens, overflow)
        task_s = self.times.prefill_s(task_tokens, 0, time.monotonic()) if task_tokens else 0.0
        compute_s = task_s * ahead / (task_tokens or 1.0) / max(1, self._unrestricted_count)
        own = tasks.of_class(priority)
        age_s = own.oldest_age_s if tenant is None else own.oldest_age_of(tenant)
        return max(compute_s, age_s)

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

    def add(self, queued: QueuedTask) -> None:
        """Adds a task that is new or was returned, and assigns it if it can."""
        self.tasks.add(queued)
        self._assign_or_queue(queued)

    def remove(self, queued: QueuedTask) -> None:
        """Removes a task. Does nothing when it does not wait here."""
        if queued not in self.tasks:
            return
        if queued in self._affinity_waits:
            self._affinity_waits.remove(queued)
        else:
            self.tasks.of_class(queued.priority).lanes.remove(queued)
        self.tasks.remove(queued)

    def add_worker(self, stream: PrefillWorkerStream) -> None:
        """Adds a worker, as yet without credits."""
        self.worker_streams[stream.ref] = stream
        self._open_streams += 1
        self._count_unrestricted()
        for queued in self.tasks:
            if not queued.fits(stream.ref, stream.usable_adapters):
                queued.exclude((stream.ref,))
            if stream.ref in queued.avoid and queued not in self._affinity_waits:
                self.tasks.of_class(queued.priority).lanes.remove(queued)
                self._add_to_lane(queued)

    def retire_worker(self, stream: PrefillWorkerStream) -> tuple[QueuedTask, ...]:
        """Assigns the worker no more tasks. Removes and returns the tasks that no other worker may take."""
        self.worker_streams.pop(stream.ref, None)
        self._count_unrestricted()
        stream.retire()
        self._with_credits.update(stream)
        for priority in Priority:
            for queued in tuple(self._affinity_waits.for_worker(stream.ref, priority)):
                self._affinity_waits.remove(queued)
                self._assign_or_queue(queued)
        active = self.worker_streams.keys()
        stranded = tuple(queued for queued in self.tasks if queued.avoid >= active)
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
                self.tasks.of_class(queued.priority).lanes.remove(queued)
                self._affinity_waits.add(queued, better, now_s)
            else:
                self.remove(queued)
                self._send(queued, stream, now_s)
        self._with_credits.update(stream)

    def end_wait(self, queued: QueuedTask) -> None:
        """A task waits no longer for a worker that has its prefix."""
        self._affinity_waits.remove(queued)
        self._assign_or_queue(queued)

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
        self.tasks.ended(queued)
        self._with_credits.update(stream)

    def task_succeeded(
        self, stream: PrefillWorkerStream, queued: QueuedTask, cached_tokens: int
    ) -> None:
        """A worker completed a task, of which it had `cached_tokens`."""
        self.task_ended(stream, queued)
        had_tokens = max(cached_tokens, queued.task.first_part.end_token)
        self.tasks.corrected(queued, max(1, queued.tokens - had_tokens))

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
            self._affinity_waits.add(queued, better, now_s)
        else:
            self.tasks.remove(queued)
            self._send(queued, stream, now_s)
            self._with_credits.update(stream)

    def send(self, queued: QueuedTask, stream: PrefillWorkerStream) -> None:
        """Sends a task that is not added to a worker with credits."""
        self._send(queued, stream, time.monotonic())
        self._with_credits.update(stream)

    def _send(self, queued: QueuedTask, stream: PrefillWorkerStream, now_s: float) -> None:
        stream.send_task(queued, now_s)
        self.tasks.handed_out(queued)

    def division(
        self, queued: QueuedTask, gain: float
    ) -> list[tuple[PrefillWorkerStream, int]] | None:
        """Two idle workers that compute a new task in turn, earlier than one, at least by the share `gain` of its time.

        Each part has its worker and its end.
        """
        first = self._with_credits.best_for(queued, restricted=False)
        fit = (one for one in self.worker_streams.values() if one.ref not in queued.avoid)
        far = queued.extra_tokens or (lambda _: 0.0)
        others = [one for one in fit if one.may_divide and one is not first]
        if first is None or not first.may_divide or not others:
            return None
        pair = first, min(others, key=lambda one: far(one.ref))
        one, other = (self.times.of(stream.ref) for stream in pair)
        if one is None or other is None:
            return None
        found = best_parts(
            (time_values(one.steps, one.handovers), time_values(other.steps, other.handovers)),
            (queued.cached_tokens(pair[0].ref), queued.cached_tokens(pair[1].ref)),
            queued.tokens,
            min(one.member.max_num_batched_tokens for one in pair),
            pair[1].layout,
            gain,
            parts_max=min(_PARTS_MAX, 2 * min(one.credits for one in pair)),
        )
        if found is None:
            return None
        return list(zip(itertools.cycle(pair), (*found[0], queued.tokens), strict=False))

    def _workers_worth_waiting_for(
        self, queued: QueuedTask, stream: PrefillWorkerStream, now_s: float
    ) -> tuple[WorkerRef, ...]:
        """Workers that have far more of the prompt cached than `stream`, and will soon have room."""
        wait_s = self._affinity_waits.wait_s
        if not queued.may_wait or wait_s <= 0:
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
                wait_s,
                tasks_ahead=self._affinity_waits.count_for(ref),
                token_s=self.times.token_s(now_s),
                now_s=now_s,
            )
        )

    def _add_to_lane(self, queued: QueuedTask) -> None:
        # Absent workers do not split lanes: `avoid` may name many that have left.
        excluded = frozenset(ref for ref in queued.avoid if ref in self.worker_streams)
        self.tasks.of_class(queued.priority).lanes.add(queued, excluded)

    def _next_for(self, stream: PrefillWorkerStream) -> QueuedTask | None:
        """The first task that the worker may get, of the class that is next."""
        firsts = (self._first_of(priority, stream) for priority in Priority)
        return self.tasks.first_of(queued for queued in firsts if queued is not None)

    def _first_of(self, priority: Priority, stream: PrefillWorkerStream) -> QueuedTask | None:
        tasks = self.tasks.of_class(priority)
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
