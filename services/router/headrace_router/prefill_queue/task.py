"""A prompt on its way through the prefill queue, and the workers that pull."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import HeadraceError
from headrace_common.queues import BoundedQueue
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_router.prefill_queue.sorted_map import Key, SortedMap

_PREFERRED_WORKERS_MAX: Final = 8
_AT_FRONT: Final = 0
_IN_TURN: Final = 1


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """How a task ended: `error` is None when its KV cache was handed over whole."""

    error: HeadraceError | None
    done: prefill_pb2.TaskDone | None


@dataclass(frozen=True, slots=True)
class TaskTerms:
    """What a task's owner asks of the queue.

    Workers in `avoid` are never handed it. `cached` says how many tokens of the prompt a worker holds. `returns_max`
    is how often it may be handed out again, when a worker gives it back unopened. `front` puts it before every task
    that never had a worker.
    """

    deadline_unix_s: float
    avoid: frozenset[WorkerRef] = frozenset()
    cached: Mapping[WorkerRef, int] = field(default_factory=dict)
    returns_max: int = 0
    front: bool = False


class QueuedTask:
    """One task, from joining the queue to its end. Only the queue changes it.

    `group_key` is the layout fingerprint of its group, and names the group in the queue.
    """

    def __init__(
        self,
        task: prefill_pb2.PrefillTask,
        group_key: KvLayout,
        terms: TaskTerms,
        number: int,
        cancel: Callable[[QueuedTask], None],
    ) -> None:
        self.task = task
        self.group_key = group_key
        self.tokens = len(task.token_ids)
        self.number = number
        self.avoid = terms.avoid
        self.lane: frozenset[WorkerRef] = frozenset()
        """Those in `avoid` that pull."""
        self.cached = terms.cached
        self.returns_left = terms.returns_max
        self.order: Key = (
            _AT_FRONT if terms.front else _IN_TURN,
            terms.deadline_unix_s,
            float(number),
        )
        self.tasks_ahead = 0
        self.queued_unix_ns = time.time_ns()
        self.queued_s = time.monotonic()
        self.pulled_unix_ns = 0
        self.pulled_s = 0.0
        self.started = False
        self.worker: WorkerRef | None = None
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[TaskOutcome] = loop.create_future()
        self.first_token: asyncio.Future[prefill_pb2.FirstToken] = loop.create_future()
        """Of a task with `sampling`: settled before `outcome`, unless that is an error."""
        self.patient = bool(terms.cached)
        """Whether it may still wait for a worker that has its prefix."""
        self.waits_for: tuple[PrefillWorkerStream, ...] = ()
        self.wait_key: Key = ()
        self._preferred_workers: list[WorkerRef] | None = None
        self._cancel = cancel

    @property
    def preferred_workers(self) -> list[WorkerRef]:
        """The workers with most of the prompt, the best first."""
        if self._preferred_workers is None:
            self._preferred_workers = heapq.nlargest(
                _PREFERRED_WORKERS_MAX, self.cached, key=self.cached.__getitem__
            )
        return self._preferred_workers

    def cached_tokens(self, ref: WorkerRef) -> int:
        """Prompt tokens that a worker need not compute."""
        return min(self.tokens, self.cached.get(ref, 0)) if self.cached else 0

    def return_from(self, ref: WorkerRef) -> None:
        """Its worker gave it back unopened: it goes to the front, and not to that worker again."""
        self.returns_left -= 1
        self.avoid |= {ref}
        self.order = (_AT_FRONT, *self.order[1:])
        self.worker = None
        self.pulled_unix_ns = 0

    def end(self, error: HeadraceError | None, done: prefill_pb2.TaskDone | None = None) -> None:
        """Settles the outcome, once."""
        if not self.outcome.done():
            self.outcome.set_result(TaskOutcome(error, done))

    def cancel(self) -> None:
        """Gives the task up: it vanishes from the queue, or its worker is told to stop."""
        self._cancel(self)


@dataclass(slots=True, eq=False)
class PrefillWorkerStream:
    """A prefill worker's stream: the room it has left and the tasks it works on."""

    ref: WorkerRef
    model: str
    group_key: KvLayout
    number: int
    outbox: BoundedQueue[prefill_pb2.PullResponse]
    credits: int = 0
    load_tokens: int = 0
    last_task_s: float = 0.0
    draining: bool = False
    tasks: dict[str, QueuedTask] = field(default_factory=dict)
    """Oldest first."""
    affinity_waiters: SortedMap[QueuedTask] = field(default_factory=SortedMap)
    """Tasks that wait for this very worker."""
    room_key: Key = ()

    def hand(self, queued: QueuedTask, now_s: float) -> None:
        """Sends the worker a task, for one credit."""
        self.credits -= 1
        self.last_task_s = now_s
        self.load_tokens += queued.tokens - queued.cached_tokens(self.ref)
        self.tasks[queued.task.transfer_id] = queued
        queued.worker = self.ref
        queued.pulled_unix_ns = time.time_ns()
        queued.pulled_s = now_s
        self.outbox.put_nowait(prefill_pb2.PullResponse(task=queued.task))

    def drop(self, transfer_id: str) -> QueuedTask | None:
        """The worker has ended a task; None when it has no such one."""
        queued = self.tasks.pop(transfer_id, None)
        if queued is not None:
            self.load_tokens -= queued.tokens - queued.cached_tokens(self.ref)
        return queued

    def has_room_within(self, wait_s: float, task_duration_s: float, now_s: float) -> bool:
        """Whether it is likely to have room for one more than hope for it already, by the age of what it works on."""
        rank = len(self.affinity_waiters)
        oldest = next(itertools.islice(self.tasks.values(), rank, None), None)
        return oldest is not None and oldest.pulled_s + task_duration_s <= now_s + wait_s
