"""The global prefill queue: prompts wait here until a prefill worker has room.

Which worker computes a prompt is decided as late as possible, by credits. A task is handed out once
at most: when its
worker fails it, the attempt fails, because the decode worker's reservation is bound to the
transfer.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import time
from dataclasses import dataclass, field

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import (
    Draining,
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    InvalidRequest,
    ProtocolViolation,
    QueueFull,
    WorkerGone,
)
from headrace_common.queues import BoundedQueue
from headrace_kv.layout import KvLayout, WorkerRef, fingerprint
from headrace_router.placement import PrefillCandidate

_LOG = logging.getLogger(__name__)

CREDITS_MAX = 1_024
PULLERS_MAX = 4_096


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """How a task ended: `error` is None when its KV cache was handed over whole."""

    error: HeadraceError | None
    done: prefill_pb2.TaskDone | None


class QueuedTask:
    """One task, from joining the queue to its end."""

    def __init__(
        self,
        queue: PrefillQueue,
        task: prefill_pb2.PrefillTask,
        layout: KvLayout,
        avoid: frozenset[WorkerRef],
        order: tuple[float, int],
        tasks_ahead: int,
    ) -> None:
        self._queue = queue
        self.task = task
        self.group = fingerprint(layout)
        self.avoid = avoid
        self.order = order
        self.tasks_ahead = tasks_ahead
        self.queued_unix_ns = time.time_ns()
        self.pulled_unix_ns = 0
        self.worker: WorkerRef | None = None
        self.outcome: asyncio.Future[TaskOutcome] = asyncio.get_running_loop().create_future()

    def end(self, error: HeadraceError | None, done: prefill_pb2.TaskDone | None = None) -> None:
        """Settles the outcome, once."""
        if not self.outcome.done():
            self.outcome.set_result(TaskOutcome(error, done))

    def cancel(self) -> None:
        """Gives the task up: it vanishes from the queue, or its worker is told to stop."""
        self._queue.cancel(self)


@dataclass(slots=True, eq=False)
class Puller:
    """A prefill worker's stream: the room it has left and the tasks it works on."""

    ref: WorkerRef
    model: str
    layout: KvLayout
    outbox: BoundedQueue[prefill_pb2.PullResponse]
    credits: int = 0
    last_task_monotonic_s: float = 0.0
    tasks: dict[str, QueuedTask] = field(default_factory=dict)
    group: KvLayout = field(init=False)
    """Workers of one group can hand over to each other."""

    def __post_init__(self) -> None:
        self.group = fingerprint(self.layout)

    def may_take(self, queued: QueuedTask) -> bool:
        """Whether the task fits this worker, whatever room it has."""
        return self.group == queued.group and self.ref not in queued.avoid


class PrefillQueue:
    """Orders tasks by deadline, then arrival. One event loop owns it."""

    def __init__(self, max_queued_tasks: int) -> None:
        self._max_queued_tasks = max_queued_tasks
        self._waiting: list[QueuedTask] = []
        self._pullers: dict[WorkerRef, Puller] = {}
        self._sequence = itertools.count()

    @property
    def depth(self) -> int:
        """Tasks that wait for a worker."""
        return len(self._waiting)

    def candidates(self) -> tuple[PrefillCandidate, ...]:
        """The prefill workers that pull now."""
        return tuple(
            PrefillCandidate(puller.ref, puller.layout) for puller in self._pullers.values()
        )

    def puller_counts(self) -> dict[str, int]:
        """Prefill workers that pull now, by served model."""
        counts: dict[str, int] = {}
        for puller in self._pullers.values():
            counts[puller.model] = counts.get(puller.model, 0) + 1
        return counts

    def enqueue(
        self,
        task: prefill_pb2.PrefillTask,
        *,
        layout: KvLayout,
        deadline_unix_s: float,
        avoid: frozenset[WorkerRef] = frozenset(),
    ) -> QueuedTask:
        """Adds a task for a decode worker of `layout`. Workers in `avoid` are never handed it.

        Raises QueueFull, or WorkerGone when no worker that pulls may take it.
        """
        if len(self._waiting) >= self._max_queued_tasks:
            raise QueueFull(
                f"the prefill queue holds its {self._max_queued_tasks} tasks already",
                metadata={"queue": "prefill", "maxsize": str(self._max_queued_tasks)},
            )
        order = (deadline_unix_s, next(self._sequence))
        index = bisect.bisect(self._waiting, order, key=lambda waiting: waiting.order)
        queued = QueuedTask(self, task, layout, avoid, order, tasks_ahead=index)
        if not self._has_taker(queued):
            raise _no_taker(task.transfer_id)
        self._waiting.insert(index, queued)
        self._hand_out()
        return queued

    def cancel(self, queued: QueuedTask) -> None:
        """See QueuedTask.cancel."""
        puller = self._pullers.get(queued.worker) if queued.worker is not None else None
        if queued.worker is None:
            self._waiting = [waiting for waiting in self._waiting if waiting is not queued]
        elif puller is not None and not queued.outcome.done():
            puller.outbox.put_nowait(
                prefill_pb2.PullResponse(
                    cancel=prefill_pb2.CancelTask(transfer_id=queued.task.transfer_id)
                )
            )
        queued.end(
            WorkerGone("the task was given up", metadata={"transfer_id": queued.task.transfer_id})
        )

    def join(self, ref: WorkerRef, model: str, layout: KvLayout) -> Puller:
        """A worker begins to pull. Raises DuplicateTransfer when this incarnation pulls already."""
        if ref in self._pullers:
            raise DuplicateTransfer(
                f"prefill worker {ref} pulls already; end its other stream first",
                metadata={"worker_id": ref.worker_id, "incarnation": ref.incarnation},
            )
        if len(self._pullers) >= PULLERS_MAX:
            raise QueueFull(
                f"{PULLERS_MAX} prefill workers pull already",
                metadata={"maxsize": str(PULLERS_MAX)},
            )
        # One message per credit and one CancelTask per task handed out, and never more.
        puller = Puller(ref, model, layout, BoundedQueue(f"pull {ref}", 4 * CREDITS_MAX))
        self._pullers[ref] = puller
        _LOG.info("prefill worker %s pulls", ref)
        return puller

    def leave(self, puller: Puller) -> None:
        """A worker's stream has ended: its tasks fail, and those that only it could take."""
        del self._pullers[puller.ref]
        _LOG.info("prefill worker %s pulls no more, %d tasks left", puller.ref, len(puller.tasks))
        for transfer_id, queued in puller.tasks.items():
            queued.end(
                WorkerGone(
                    f"prefill worker {puller.ref} vanished with task {transfer_id}",
                    metadata={"worker_id": puller.ref.worker_id, "transfer_id": transfer_id},
                )
            )
        puller.tasks.clear()
        stranded = [waiting for waiting in self._waiting if not self._has_taker(waiting)]
        self._waiting = [waiting for waiting in self._waiting if waiting not in stranded]
        for queued in stranded:
            queued.end(_no_taker(queued.task.transfer_id))

    def add_credits(self, puller: Puller, task_count: int) -> None:
        """A worker has room for more. Raises ProtocolViolation beyond CREDITS_MAX tasks in all."""
        if puller.credits + len(puller.tasks) + task_count > CREDITS_MAX:
            raise ProtocolViolation(
                f"prefill worker {puller.ref} asks for more than {CREDITS_MAX} tasks",
                metadata={"worker_id": puller.ref.worker_id, "credits_max": str(CREDITS_MAX)},
            )
        puller.credits += task_count
        self._hand_out()

    def finish(self, puller: Puller, done: prefill_pb2.TaskDone) -> None:
        """A worker has ended a task. One that nobody waits for any more is merely noted."""
        queued = puller.tasks.pop(done.transfer_id, None)
        if queued is None:
            _LOG.warning("prefill worker %s ended unknown task %s", puller.ref, done.transfer_id)
            return
        if done.reason:
            _LOG.info("task %s failed on %s: %s", done.transfer_id, puller.ref, done.detail)
        if done.reason == Draining.reason:
            # It will refuse all that its other credits would bring.
            puller.credits = 0
        queued.end(_error_of(done) if done.reason else None, done)

    def _has_taker(self, queued: QueuedTask) -> bool:
        return any(puller.may_take(queued) for puller in self._pullers.values())

    def _hand_out(self) -> None:
        """Gives the most urgent tasks to the workers with the most room, longest idle first."""
        still_waiting: list[QueuedTask] = []
        with_room = [puller for puller in self._pullers.values() if puller.credits > 0]
        for index, queued in enumerate(self._waiting):
            if not with_room:
                still_waiting.extend(self._waiting[index:])
                break
            takers = [puller for puller in with_room if puller.may_take(queued)]
            if not takers:
                still_waiting.append(queued)
                continue
            puller = max(takers, key=lambda taker: (taker.credits, -taker.last_task_monotonic_s))
            self._hand_to(puller, queued)
            if not puller.credits:
                with_room.remove(puller)
        self._waiting = still_waiting

    def _hand_to(self, puller: Puller, queued: QueuedTask) -> None:
        puller.credits -= 1
        puller.last_task_monotonic_s = time.monotonic()
        puller.tasks[queued.task.transfer_id] = queued
        queued.worker = puller.ref
        queued.pulled_unix_ns = time.time_ns()
        puller.outbox.put_nowait(prefill_pb2.PullResponse(task=queued.task))


def _no_taker(transfer_id: str) -> WorkerGone:
    return WorkerGone(
        "no prefill worker that could take the task pulls any more",
        metadata={"transfer_id": transfer_id},
    )


def _error_of(done: prefill_pb2.TaskDone) -> HeadraceError:
    kinds = {kind.reason: kind for kind in HeadraceError.__subclasses__()}
    kind = kinds.get(done.reason, InternalError)
    if kind is InvalidRequest:
        return InvalidRequest({"prompt": done.detail})
    return kind(done.detail, metadata={"transfer_id": done.transfer_id})
