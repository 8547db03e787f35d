"""The part of the prefill queue whose workers can all hand over to each other: who gets which task."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_router.prefill_queue.estimate import ThroughputEstimator
from headrace_router.prefill_queue.sorted_map import SortedMap
from headrace_router.prefill_queue.task import PrefillWorkerStream, QueuedTask

# Waiting for a worker pays when it saves at least this part of the prompt.
_WORTHY_SHARE: Final = 0.25


class QueueGroup:
    """Tasks by urgency, workers by room.

    Tasks that the same workers must not get stand in one lane, so that the next task for a worker is the first of a
    lane, whatever the other lanes hold.
    """

    def __init__(self, layout: KvLayout, prefix_wait_s: float) -> None:
        self.layout = layout
        """The fingerprint that the group's workers share."""
        self.pullers: dict[WorkerRef, PrefillWorkerStream] = {}
        """Those that take tasks."""
        self.streams = 0
        """All whose stream lasts."""
        self.pace = ThroughputEstimator()
        self.queued_tokens = 0
        self.running_tasks = 0
        self.promised_tasks = 0
        self.promised_tokens = 0
        self._room_tasks = 0
        self._prefix_wait_s = prefix_wait_s
        self._waiting: OrderedDict[int, QueuedTask] = OrderedDict()
        self._lanes: dict[frozenset[WorkerRef], SortedMap[QueuedTask]] = {}
        self._with_room: dict[WorkerRef, PrefillWorkerStream] = {}
        self._by_room: SortedMap[PrefillWorkerStream] = SortedMap()
        self._hopes: SortedMap[QueuedTask] = SortedMap()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedTask]:
        return iter(self._waiting.values())

    @property
    def oldest_age_s(self) -> float:
        """How long the task that came first has waited; 0 when none waits."""
        oldest = next(iter(self._waiting.values()), None)
        return time.monotonic() - oldest.queued_s if oldest is not None else 0.0

    @property
    def wait_s(self) -> float:
        """How long a task that came now would wait for a worker, once all that are promised have come."""
        overflow_tasks = self.promised_tasks - self._room_tasks
        if overflow_tasks < 0:
            return 0.0
        # Those that find room count as running, the others stand in line.
        overflow = overflow_tasks / self.promised_tasks if self.promised_tasks else 0.0
        pace_s = self.pace.wait_s(
            self.queued_tokens + int(overflow * self.promised_tokens),
            self.running_tasks + self._room_tasks,
        )
        return max(pace_s, self.oldest_age_s)

    def has_taker(self, queued: QueuedTask) -> bool:
        """Whether a worker that pulls may take the task, whatever room it has."""
        return any(ref not in queued.avoid for ref in self.pullers)

    def tasks_before(self, queued: QueuedTask) -> int:
        """Tasks that wait and are more urgent."""
        return sum(lane.rank(queued.order) for lane in self._lanes.values())

    def add(self, queued: QueuedTask) -> None:
        """A task comes, or comes back."""
        self._waiting[queued.number] = queued
        if queued.order[0] == 0:
            # Those that come back have waited longest, or nearly so.
            self._waiting.move_to_end(queued.number, last=False)
        self.queued_tokens += queued.tokens
        self._offer(queued)

    def remove(self, queued: QueuedTask) -> bool:
        """Takes a task out; False when it does not wait here."""
        if queued.number not in self._waiting:
            return False
        if queued.waits_for:
            self._end_hope(queued)
        else:
            self._leave_lane(queued)
        self._forget(queued)
        return True

    def join(self, puller: PrefillWorkerStream) -> None:
        """A worker begins to pull, as yet without room."""
        self.pullers[puller.ref] = puller
        self.streams += 1
        for queued in self:
            if puller.ref in queued.avoid and not queued.waits_for:
                self._leave_lane(queued)
                self._enter_lane(queued)

    def leave(self, puller: PrefillWorkerStream) -> tuple[QueuedTask, ...]:
        """A worker takes nothing more. The tasks that nobody else may take are taken out, and returned."""
        self.pullers.pop(puller.ref, None)
        puller.credits = 0
        self._note_room(puller)
        for queued in tuple(puller.affinity_waiters):
            self._end_hope(queued)
            self._offer(queued)
        active = self.pullers.keys()
        stranded = tuple(queued for queued in self if queued.avoid >= active)
        for queued in stranded:
            self.remove(queued)
        return stranded

    def serve(self, puller: PrefillWorkerStream) -> None:
        """Gives a worker tasks for the room that it has."""
        now_s = time.monotonic()
        while puller.credits and (queued := self._next_for(puller)) is not None:
            hopes = () if queued.waits_for else self._worth_waiting_for(queued, puller, now_s)
            if hopes:
                self._leave_lane(queued)
                self._wait_for_affinity(queued, hopes, now_s)
            else:
                self.remove(queued)
                self._hand(queued, puller, now_s)
        self._note_room(puller)

    def drop(self, puller: PrefillWorkerStream, transfer_id: str) -> QueuedTask | None:
        """A worker has ended a task; None when it has no such one."""
        queued = puller.drop(transfer_id)
        if queued is not None:
            self.running_tasks -= 1
            self._note_room(puller)
        return queued

    def close(self) -> None:
        """Ends the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _offer(self, queued: QueuedTask) -> None:
        """A task that waits goes to a worker with room, or waits for a better one, or takes its place in a lane."""
        puller = self._best_with_room(queued)
        now_s = time.monotonic()
        hopes = self._worth_waiting_for(queued, puller, now_s) if puller is not None else ()
        if hopes:
            self._wait_for_affinity(queued, hopes, now_s)
        elif puller is None:
            self._enter_lane(queued)
        else:
            self._forget(queued)
            self._hand(queued, puller, now_s)
            self._note_room(puller)

    def _hand(self, queued: QueuedTask, puller: PrefillWorkerStream, now_s: float) -> None:
        puller.hand(queued, now_s)
        self.running_tasks += 1

    def _note_room(self, puller: PrefillWorkerStream) -> None:
        """Files a worker under the room that it has now."""
        if puller.room_key:
            self._by_room.remove(puller.room_key)
            del self._with_room[puller.ref]
            self._room_tasks += int(puller.room_key[1])
            puller.room_key = ()
        if puller.credits:
            puller.room_key = (
                float(puller.load_tokens),
                -float(puller.credits),
                puller.last_task_s,
                float(puller.number),
            )
            self._by_room.add(puller.room_key, puller)
            self._with_room[puller.ref] = puller
            self._room_tasks += puller.credits

    def _best_with_room(self, queued: QueuedTask) -> PrefillWorkerStream | None:
        """The worker where the fewest tokens are to be computed, counting those that it computes already."""
        best = next((puller for puller in self._by_room if puller.ref not in queued.avoid), None)
        if best is None or not queued.cached:
            return best
        least = best.load_tokens - queued.cached_tokens(best.ref)
        for ref, cached_tokens in queued.cached.items():
            # Even without anything else to do it would not be better.
            if -cached_tokens >= least:
                continue
            puller = self._with_room.get(ref)
            if puller is None or ref in queued.avoid:
                continue
            tokens = puller.load_tokens - queued.cached_tokens(ref)
            if tokens < least:
                best, least = puller, tokens
        return best

    def _worth_waiting_for(
        self, queued: QueuedTask, puller: PrefillWorkerStream, now_s: float
    ) -> tuple[PrefillWorkerStream, ...]:
        """Workers soon to have room that hold far more of the prompt than the one that would take it now."""
        if not queued.patient or self._prefix_wait_s <= 0:
            return ()
        worthy = queued.cached_tokens(puller.ref) + max(1.0, _WORTHY_SHARE * queued.tokens)
        return tuple(
            better
            for ref in queued.preferred_workers
            if queued.cached_tokens(ref) >= worthy
            and ref not in queued.avoid
            and (better := self.pullers.get(ref)) is not None
            and not better.credits
            and better.has_room_within(self._prefix_wait_s, self.pace.task_duration_s, now_s)
        )

    def _wait_for_affinity(
        self, queued: QueuedTask, pullers: tuple[PrefillWorkerStream, ...], now_s: float
    ) -> None:
        """Sets a task aside for the workers that it hopes for, until its patience ends."""
        queued.patient = False
        queued.waits_for = pullers
        queued.wait_key = (now_s + self._prefix_wait_s, float(queued.number))
        for puller in pullers:
            puller.affinity_waiters.add(queued.order, queued)
        self._hopes.add(queued.wait_key, queued)
        self._arm()

    def _end_hope(self, queued: QueuedTask) -> None:
        for puller in queued.waits_for:
            puller.affinity_waiters.remove(queued.order)
        self._hopes.remove(queued.wait_key)
        queued.waits_for = ()

    def _arm(self) -> None:
        if self._timer is None and self._hopes:
            delay_s = max(0.0, self._hopes.first_key[0] - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_patience)

    def _end_patience(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        while self._hopes and self._hopes.first_key[0] <= now_s:
            queued = self._hopes.first
            self._end_hope(queued)
            self._offer(queued)
        self._arm()

    def _forget(self, queued: QueuedTask) -> None:
        del self._waiting[queued.number]
        self.queued_tokens -= queued.tokens

    def _enter_lane(self, queued: QueuedTask) -> None:
        queued.lane = frozenset(ref for ref in queued.avoid if ref in self.pullers)
        self._lanes.setdefault(queued.lane, SortedMap()).add(queued.order, queued)

    def _leave_lane(self, queued: QueuedTask) -> None:
        lane = self._lanes[queued.lane]
        lane.remove(queued.order)
        if not lane:
            del self._lanes[queued.lane]

    def _next_for(self, puller: PrefillWorkerStream) -> QueuedTask | None:
        """The most urgent task that the worker may take."""
        best = puller.affinity_waiters.first if puller.affinity_waiters else None
        for avoid, lane in self._lanes.items():
            if puller.ref not in avoid and (best is None or lane.first_key < best.order):
                best = lane.first
        return best
