"""Tasks of one group that wait, in the order in which they are handed out. Pure but for the clock."""

from __future__ import annotations

import time
from collections import OrderedDict

from sortedcontainers import SortedDict

from headrace_common.callers.priority import Priority
from headrace_kv.layout.layout import WorkerRef
from headrace_router.prefill_queue.task import QueuedTask, TaskOrder


class TaskLanes:
    """Waiting tasks, in one lane for each set of excluded workers.

    The next task for a worker is the first of some lane. To find it is independent of the number of tasks.
    """

    def __init__(self) -> None:
        self._lanes: dict[frozenset[WorkerRef], SortedDict[TaskOrder, QueuedTask]] = {}
        self._excluded: dict[int, frozenset[WorkerRef]] = {}

    def add(self, queued: QueuedTask, excluded: frozenset[WorkerRef]) -> None:
        """Adds a task that these workers may not get."""
        self._excluded[queued.number] = excluded
        lane = self._lanes.get(excluded)
        if lane is None:
            lane = self._lanes[excluded] = SortedDict()
        lane[queued.order] = queued

    def remove(self, queued: QueuedTask) -> None:
        """Removes a task that is in a lane."""
        excluded = self._excluded.pop(queued.number)
        lane = self._lanes[excluded]
        del lane[queued.order]
        if not lane:
            del self._lanes[excluded]

    def tasks_before(self, order: TaskOrder) -> int:
        """The number of tasks that are handed out before one with this order."""
        return sum(lane.bisect_left(order) for lane in self._lanes.values())

    def first_for(self, ref: WorkerRef) -> QueuedTask | None:
        """The first task that the worker may get."""
        best: QueuedTask | None = None
        for excluded, lane in self._lanes.items():
            if ref not in excluded:
                order, queued = lane.peekitem(0)
                if best is None or order < best.order:
                    best = queued
        return best


class AffinityWaits:
    """Tasks that wait for one of a few workers that have their prefix, each until its own end of the wait."""

    def __init__(self) -> None:
        self._waits: dict[int, tuple[float, tuple[WorkerRef, ...]]] = {}
        self._by_end: SortedDict[tuple[float, int], QueuedTask] = SortedDict()
        self._by_worker: dict[tuple[WorkerRef, Priority], SortedDict[TaskOrder, QueuedTask]] = {}

    def __contains__(self, queued: QueuedTask) -> bool:
        return queued.number in self._waits

    @property
    def next_end_s(self) -> float | None:
        """When the next wait ends, on the monotonic clock. None without waits."""
        return self._by_end.peekitem(0)[0][0] if self._by_end else None

    def add(self, queued: QueuedTask, refs: tuple[WorkerRef, ...], end_s: float) -> None:
        """Adds a task that waits for these workers until `end_s`."""
        self._waits[queued.number] = end_s, refs
        self._by_end[end_s, queued.number] = queued
        for ref in refs:
            waiting = self._by_worker.setdefault((ref, queued.priority), SortedDict())
            waiting[queued.order] = queued

    def remove(self, queued: QueuedTask) -> None:
        """Removes a task that waits."""
        end_s, refs = self._waits.pop(queued.number)
        del self._by_end[end_s, queued.number]
        for ref in refs:
            waiting = self._by_worker[ref, queued.priority]
            del waiting[queued.order]
            if not waiting:
                del self._by_worker[ref, queued.priority]

    def remove_ended(self, now_s: float) -> QueuedTask | None:
        """Removes a task with a wait that has ended, and returns it. None when there is none."""
        if not self._by_end:
            return None
        (end_s, _), queued = self._by_end.peekitem(0)
        if end_s > now_s:
            return None
        self.remove(queued)
        return queued  # type: ignore[no-any-return]

    def count_for(self, ref: WorkerRef) -> int:
        """The number of tasks that wait for this worker."""
        return sum(len(self._by_worker.get((ref, priority), ())) for priority in Priority)

    def first_for(self, ref: WorkerRef, priority: Priority) -> QueuedTask | None:
        """The first task of a class that waits for this worker."""
        waiting = self._by_worker.get((ref, priority))
        return waiting.peekitem(0)[1] if waiting else None

    def tasks_for(self, ref: WorkerRef) -> tuple[QueuedTask, ...]:
        """All tasks that wait for this worker, in order within each class."""
        return tuple(
            queued
            for priority in Priority
            for queued in self._by_worker.get((ref, priority), {}).values()
        )


class ClassTasks:
    """The tasks of one class that wait: in the lanes, or for workers that have their prefix."""

    def __init__(self) -> None:
        self.tasks: OrderedDict[int, QueuedTask] = OrderedDict()
        """All of them by number, oldest first."""
        self.tokens = 0
        self.lanes = TaskLanes()

    @property
    def oldest_age_s(self) -> float:
        """How long the oldest task has waited; 0 without tasks."""
        oldest = next(iter(self.tasks.values()), None)
        return time.monotonic() - oldest.queued_s if oldest is not None else 0.0

    def add(self, queued: QueuedTask) -> None:
        """Counts a task that waits from now on."""
        self.tasks[queued.number] = queued
        if queued.at_front:
            # These tasks have waited longest, or nearly so.
            self.tasks.move_to_end(queued.number, last=False)
        self.tokens += queued.tokens

    def remove(self, queued: QueuedTask) -> None:
        """A task waits no more. It is in no lane."""
        del self.tasks[queued.number]
        self.tokens -= queued.tokens
