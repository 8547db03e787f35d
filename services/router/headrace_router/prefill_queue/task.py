"""A prompt on its way through the prefill queue."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from headrace.inference.v1 import inference_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import HeadraceError
from headrace_common.registry.adapters import Adapter
from headrace_frontend.request.images import PromptImages
from headrace_frontend.tenants import DEFAULT_TENANT
from headrace_kv.layout import KvLayout, WorkerRef

_PREFERRED_WORKERS_MAX: Final = 8
_AT_FRONT: Final = 0
_IN_TURN: Final = 1

SignTask: TypeAlias = Callable[[prefill_pb2.PrefillTask, WorkerRef, bytes], bytes]
"""The handoff ticket of a task for a prefill worker. The last argument is the hash of its layout."""
TaskOrder: TypeAlias = tuple[int, float, int]
"""Tasks of a tenant and class are handed out in this order, smallest first. It is unique for each task."""


@dataclass(frozen=True, slots=True)
class TaskTerms:
    """What a request asks of the queue for its task.

    `deadline_s` is by the router's monotonic clock. The queue never hands the task to a worker in `avoid`. `cached`
    gives the prompt tokens that each worker has cached. A worker may return the task unopened `returns_max` times.
    `front` puts the task before all tasks of its tenant and class that were never handed out.
    `planned` gets the task if it has room. `images` are those of the task's prompt. Two workers compute it where that
    takes less time by the share `divide_gain`; 0: never.
    """

    deadline_s: float
    avoid: frozenset[WorkerRef] = frozenset()
    cached: Mapping[WorkerRef, int] = field(default_factory=dict)
    returns_max: int = 0
    front: bool = False
    priority: Priority = Priority.NORMAL
    tenant: str = DEFAULT_TENANT
    planned: WorkerRef | None = None
    images: PromptImages = ()
    divide_gain: float = 0.0

    def missing_tokens(self, tokens: int) -> int:
        """Of `tokens`, those that the worker with the longest cached prefix has to compute."""
        return max(1, tokens - max(self.cached.values(), default=0))


class QueuedTask:
    """One task, from joining the queue to its end.

    `group_key` is the layout fingerprint of the task's group.
    """

    def __init__(
        self,
        task: prefill_pb2.PrefillTask,
        group_key: KvLayout,
        terms: TaskTerms,
        number: int,
        cancel: Callable[[QueuedTask], None],
        fits_pair: Callable[[WorkerRef], bool] | None = None,
        extra_tokens: Callable[[WorkerRef], float] | None = None,
    ) -> None:
        """The tokens leave `task`.

        `fits_pair` and `extra_tokens` are those of the policy for pairs, for the task's decode worker.
        """
        self.task = task
        self.decode = WorkerRef(task.decode_worker_id, task.decode_incarnation)
        self.group_key = group_key
        self._token_ids = inference_pb2.TokenIds(ids=task.token_ids)
        del task.token_ids[:]
        self._images = terms.images
        self.tokens = len(self._token_ids.ids)
        self.missing_tokens = terms.missing_tokens(self.tokens)
        self.number = number
        self.adapter = (
            Adapter(task.adapter.name, task.adapter.digest) if task.HasField("adapter") else None
        )
        self.priority = terms.priority
        self.tenant = terms.tenant
        self.avoid = terms.avoid
        self.cached = terms.cached
        self.planned = terms.planned
        self.returns_left = terms.returns_max
        self.order: TaskOrder = (_AT_FRONT if terms.front else _IN_TURN, terms.deadline_s, number)
        self.tasks_ahead = 0
        self.counted_tokens = 0
        """Tokens to compute that count for the tenant and the class since the task was handed out."""
        self.queued_ns = time.monotonic_ns()
        self.queued_s = time.monotonic()
        self.pulled_ns = 0
        self.ended_ns = 0
        self.pulled_s = 0.0
        self.has_started = False
        """Whether the worker may have opened the transfer."""
        self._on_report: Callable[[prefill_pb2.TaskDone], None] = lambda done: None
        self.may_wait = bool(terms.cached) and terms.planned is None
        """Whether the task may still wait for a worker that has its prefix."""
        self.worker: WorkerRef | None = None
        self.part: QueuedTask | None = None
        """The task of another worker that computes the tokens before its own at the same time."""
        self._on_failed: tuple[Callable[[], None], ...] = ()
        loop = asyncio.get_running_loop()
        # The error, None when the whole KV cache was handed over.
        self.outcome: asyncio.Future[HeadraceError | None] = loop.create_future()
        self._report: asyncio.Future[prefill_pb2.TaskDone | None] = loop.create_future()
        """What the worker has reported at the end of the task. None: it will report nothing."""
        self.first_token: asyncio.Future[prefill_pb2.FirstToken] = loop.create_future()
        """For a task with `sampling`: settled before `outcome`, unless the outcome is an error."""
        self._preferred_workers: list[WorkerRef] | None = None
        self._fits_pair = fits_pair
        self.extra_tokens = extra_tokens
        """Cost of the hand-over by prefill worker, in tokens to compute. None when it is 0 for each."""
        self._deadline = Deadline(terms.deadline_s)
        self._cancel = cancel

    @property
    def at_front(self) -> bool:
        """Whether the task goes before all tasks of its tenant and class that were never handed out."""
        return self.order[0] == _AT_FRONT

    @property
    def fits_all(self) -> bool:
        """Whether every worker of the layout may take the task."""
        return self.adapter is None and self._fits_pair is None

    def fits(self, ref: WorkerRef, adapters: frozenset[Adapter]) -> bool:
        """Whether a worker with these adapters may take the task."""
        if self.adapter is not None and self.adapter not in adapters:
            return False
        return self._fits_pair is None or self._fits_pair(ref)

    @property
    def preferred_workers(self) -> list[WorkerRef]:
        """The workers with the longest cached prefixes, longest first."""
        if self._preferred_workers is None:
            self._preferred_workers = heapq.nlargest(
                _PREFERRED_WORKERS_MAX, self.cached, key=self.cached.__getitem__
            )
        return self._preferred_workers

    def cached_tokens(self, ref: WorkerRef) -> int:
        """Prompt tokens that the worker need not compute."""
        return min(self.tokens, self.cached.get(ref, 0)) if self.cached else 0

    def message(self, handoff_ticket: bytes) -> prefill_pb2.PullResponse:
        """The task for a worker, with its ticket and the time that is left for it now."""
        message = prefill_pb2.PullResponse(task=self.task)
        message.task.token_ids.MergeFrom(self._token_ids.ids)
        message.task.images.extend(self._images)
        message.task.handoff_ticket = handoff_ticket
        message.task.priority = self.priority.to_proto()
        message.task.remaining.CopyFrom(duration_from_seconds(self._deadline.remaining_s()))
        return message

    def report_end(self, on_report: Callable[[prefill_pb2.TaskDone], None]) -> None:
        """`on_report` gets the worker's report at the end of the task, also if it was given up before."""
        self._on_report = on_report

    def joined_queue(self, tasks_ahead: int) -> None:
        """The task joined the queue behind `tasks_ahead` others."""
        self.tasks_ahead = tasks_ahead

    def affinity_wait_started(self) -> None:
        """The task waits for workers that have its prefix. A task waits once."""
        self.may_wait = False

    def handed_to(self, ref: WorkerRef, now_s: float) -> None:
        """The queue sent the task to a worker."""
        self.worker = ref
        self.counted_tokens = max(1, self.tokens - self.cached_tokens(ref))
        self.pulled_ns = time.monotonic_ns()
        self.pulled_s = now_s

    def exclude(self, refs: Iterable[WorkerRef]) -> None:
        """The task is never handed to these workers."""
        self.avoid |= frozenset(refs)

    def started(self) -> None:
        """The worker is about to open the transfer."""
        self.has_started = True

    def first_token_made(self, first: prefill_pb2.FirstToken) -> None:
        """The worker made the first token. Repeats are ignored."""
        if not self.first_token.done():
            self.first_token.set_result(first)

    def part_task(self, end_token: int) -> prefill_pb2.PrefillTask:
        """A task for the tokens before `end_token`, as yet for no worker."""
        task = deepcopy(self.task)
        for name in ("sampling", "send_hidden_state", "start_token"):
            task.ClearField(name)
        # As of a prefix that is fetched.
        task.transfer_id = f"{self.task.transfer_id}.prefix"
        task.token_ids.extend(self._token_ids.ids[:end_token])
        return task

    @property
    def parts(self) -> Iterator[QueuedTask]:
        """The tasks that compute its first tokens, latest tokens first."""
        part = self.part
        while part is not None:
            yield part
            part = part.part

    def end_on_failure(self, stop: Callable[[], None]) -> None:
        """`stop` is called if the task fails: it ends the work of another worker for it."""
        self._on_failed += (stop,)

    def divide(
        self, task: prefill_pb2.PrefillTask, ref: WorkerRef, terms: TaskTerms, number: int
    ) -> QueuedTask:
        """Another worker computes the tokens of `task`, which is returned, and this one the others beside it."""
        self.part = QueuedTask(task, self.group_key, terms, number, self._cancel)
        self.cached, self.may_wait = {ref: self.part.tokens}, False
        self.end_on_failure(self.part.cancel)
        return self.part

    async def failed_worker(self, late: Deadline) -> WorkerRef | None:
        """The worker by which the task has failed: of two that compute it, the one that the reports of its parts state.

        Waits for these until `late`: a part that was given up has an outcome before the report of its worker.
        None when a stream between them has ended: of these, the one that is gone is not asked again.
        """
        if self.part is None:
            return self.worker
        await asyncio.wait({self._report}, timeout=late.remaining_s())
        done = self._report.result() if self._report.done() else None
        if done is None or not done.failed_part:
            return self.worker
        in_part = done.failed_part == prefill_pb2.FAILED_PART_FIRST
        return await self.part.failed_worker(late) if in_part else None

    def returned_from(self, ref: WorkerRef) -> None:
        """The worker returned the task unopened. The task goes to the front, and never to that worker again."""
        self.returns_left -= 1
        self.avoid |= {ref}
        self.order = (_AT_FRONT, *self.order[1:])
        self.worker = None
        self.pulled_ns = 0
        self._failed()
        self.part = None
        self.task.ClearField("first_part")

    def end(self, error: HeadraceError | None, done: prefill_pb2.TaskDone | None = None) -> None:
        """Settles the outcome. Only the first call counts, and the report of a task that was given up."""
        self.settle(error)
        if not self._report.done():
            self._report.set_result(done)
        if done is not None:
            self._on_report(done)

    def settle(self, error: HeadraceError | None) -> None:
        """Settles the outcome, of which only the first counts. The worker may still report the end."""
        self.ended_ns = time.monotonic_ns()
        if not self.outcome.done():
            self.outcome.set_result(error)
            if error is not None:
                self._failed()

    def _failed(self) -> None:
        stops, self._on_failed = self._on_failed, ()
        for stop in stops:
            stop()

    def cancel(self) -> None:
        """Removes the task from the queue, or asks its worker to stop. Ends it with WorkerGone."""
        self._cancel(self)


def sent_tokens(task: prefill_pb2.PrefillTask) -> int:
    """Tokens that a task hands over."""
    return max(0, len(task.token_ids) - task.start_token)
