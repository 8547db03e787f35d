"""The global prefill queue: prompts wait here until a prefill worker has room.

Which worker computes a prompt is decided as late as possible, by credits: the one that needs to compute least, with
what it computes already. A task whose worker vanished before it opened the transfer goes to another worker, for the
decode worker's reservation is still good. Once the transfer may be open it is bound to the worker that opened it, and
the attempt fails. To take an opened transfer for an unopened one does no harm: decode admits one incarnation to a
transfer and refuses the others.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

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
from headrace_kv.layout.compatibility import fingerprint
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_router.prefill_queue.estimate import QueueEstimate
from headrace_router.prefill_queue.group import QueueGroup
from headrace_router.prefill_queue.task import PrefillWorkerStream, QueuedTask, TaskTerms

_LOG = logging.getLogger(__name__)

CREDITS_MAX = 1_024
PULLERS_MAX = 4_096
_RETRY_AFTER_MAX_S = 60.0
# With these a worker turns down what it has not begun.
_REFUSALS = (Draining.reason, QueueFull.reason)


class PrefillQueue:
    """Orders tasks by deadline, then arrival; tasks that come back stand before the others.

    A task waits for a worker that holds its prefix, when another has room, for at most `prefix_wait_s`, once. One event
    loop owns the queue.
    """

    def __init__(self, max_queued_tasks: int, prefix_wait_s: float = 0.05) -> None:
        self.max_queued_tasks = max_queued_tasks
        self._prefix_wait_s = prefix_wait_s
        self._groups: dict[KvLayout, QueueGroup] = {}
        self._pullers: dict[WorkerRef, PrefillWorkerStream] = {}
        self._partners: dict[KvLayout, frozenset[WorkerRef]] = {}
        self._numbers = itertools.count(1)

    @property
    def depth(self) -> int:
        """Tasks that wait for a worker."""
        return sum(len(group) for group in self._groups.values())

    def estimate(self, model: str = "") -> QueueEstimate:
        """The queue of one served model, or the whole one; `wait_s` is that of the workers that are soonest free."""
        groups = self._groups_of(model)
        depth = sum(map(len, groups))
        wait_s = min((group.wait_s for group in groups), default=0.0)
        promised_tasks = sum(group.promised_tasks for group in self._groups.values())
        return QueueEstimate(
            depth=depth,
            queued_tokens=sum(group.queued_tokens for group in groups),
            oldest_age_s=max((group.oldest_age_s for group in groups), default=0.0),
            wait_s=math.inf if self.depth + promised_tasks >= self.max_queued_tasks else wait_s,
        )

    def partners(self) -> Mapping[KvLayout, frozenset[WorkerRef]]:
        """The workers that take tasks, by the fingerprint of their layout. Kept up to date, so do not keep it."""
        return self._partners

    def puller_counts(self) -> dict[str, int]:
        """Prefill workers that pull now, by served model."""
        counts: dict[str, int] = {}
        for puller in self._pullers.values():
            counts[puller.model] = counts.get(puller.model, 0) + 1
        return counts

    @contextmanager
    def promised(self, layout: KvLayout, tokens: int) -> Iterator[None]:
        """Counts a prompt that is to be queued once its blocks are reserved, so that others see what comes.

        Prompts that arrive within one reservation would else all find the same short queue.
        """
        group = self._groups.get(fingerprint(layout))
        if group is None:
            yield
            return
        group.promised_tasks += 1
        group.promised_tokens += tokens
        try:
            yield
        finally:
            group.promised_tasks -= 1
            group.promised_tokens -= tokens

    def enqueue(
        self, task: prefill_pb2.PrefillTask, *, layout: KvLayout, terms: TaskTerms
    ) -> QueuedTask:
        """Adds a task for a decode worker of `layout`.

        Raises QueueFull, or WorkerGone when no worker that pulls may take it.
        """
        if self._full:
            raise self._full_error()
        group = self._groups.get(fingerprint(layout))
        if group is None:
            raise _no_taker(task.transfer_id)
        queued = QueuedTask(task, group.layout, terms, next(self._numbers), self.cancel)
        if not group.has_taker(queued):
            raise _no_taker(task.transfer_id)
        queued.tasks_ahead = group.tasks_before(queued)
        group.add(queued)
        return queued

    def cancel(self, queued: QueuedTask) -> None:
        """See QueuedTask.cancel."""
        transfer_id = queued.task.transfer_id
        puller = self._pullers.get(queued.worker) if queued.worker is not None else None
        if queued.worker is None:
            group = self._groups.get(queued.group_key)
            if group is not None:
                group.remove(queued)
        elif puller is not None and not queued.outcome.done():
            cancel = prefill_pb2.CancelTask(transfer_id=transfer_id)
            puller.outbox.put_nowait(prefill_pb2.PullResponse(cancel=cancel))
        queued.end(WorkerGone("the task was given up", metadata={"transfer_id": transfer_id}))

    def join(self, ref: WorkerRef, model: str, layout: KvLayout) -> PrefillWorkerStream:
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
        outbox: BoundedQueue[prefill_pb2.PullResponse] = BoundedQueue(
            f"pull {ref}", 4 * CREDITS_MAX
        )
        key = fingerprint(layout)
        group = self._groups.setdefault(key, QueueGroup(key, self._prefix_wait_s))
        puller = PrefillWorkerStream(ref, model, key, next(self._numbers), outbox)
        self._pullers[ref] = puller
        group.join(puller)
        self._note_partners(group)
        _LOG.info("prefill worker %s pulls", ref)
        return puller

    def leave(self, puller: PrefillWorkerStream) -> None:
        """A worker's stream has ended.

        What it had not opened goes to the front, or fails like the rest when it was given back too often or nobody
        else can take it.
        """
        del self._pullers[puller.ref]
        _LOG.info("prefill worker %s pulls no more, %d tasks left", puller.ref, len(puller.tasks))
        self._retire(puller)
        for transfer_id in tuple(puller.tasks):
            error = WorkerGone(
                f"prefill worker {puller.ref} vanished with task {transfer_id}",
                metadata={"worker_id": puller.ref.worker_id, "transfer_id": transfer_id},
            )
            self._give_back(puller, transfer_id, error, None)
        group = self._groups[puller.group_key]
        group.streams -= 1
        if not group.streams:
            group.close()
            del self._groups[group.layout]

    def add_credits(self, puller: PrefillWorkerStream, task_count: int) -> None:
        """A worker has room for more. Raises ProtocolViolation beyond CREDITS_MAX tasks in all."""
        if puller.credits + len(puller.tasks) + task_count > CREDITS_MAX:
            raise ProtocolViolation(
                f"prefill worker {puller.ref} asks for more than {CREDITS_MAX} tasks",
                metadata={"worker_id": puller.ref.worker_id, "credits_max": str(CREDITS_MAX)},
            )
        if puller.draining:
            return
        puller.credits += task_count
        self._groups[puller.group_key].serve(puller)

    def start(self, puller: PrefillWorkerStream, transfer_id: str) -> None:
        """A worker is about to open a task's transfer, so that nobody else can do the task."""
        queued = puller.tasks.get(transfer_id)
        if queued is None:
            _LOG.warning("prefill worker %s started unknown task %s", puller.ref, transfer_id)
        else:
            queued.started = True

    def first_token(self, puller: PrefillWorkerStream, first: prefill_pb2.FirstToken) -> None:
        """A worker has made a task's first token. The first one counts."""
        queued = puller.tasks.get(first.transfer_id)
        if queued is None or not queued.task.HasField("sampling"):
            _LOG.warning(
                "prefill worker %s made a token of task %s unasked", puller.ref, first.transfer_id
            )
        elif not queued.first_token.done():
            queued.first_token.set_result(first)

    def finish(self, puller: PrefillWorkerStream, done: prefill_pb2.TaskDone) -> None:
        """A worker has ended a task. One that nobody waits for any more is merely noted."""
        queued = puller.tasks.get(done.transfer_id)
        if queued is None:
            _LOG.warning("prefill worker %s ended unknown task %s", puller.ref, done.transfer_id)
            return
        if done.reason:
            _LOG.info("task %s failed on %s: %s", done.transfer_id, puller.ref, done.detail)
        refused = done.reason in _REFUSALS and not queued.started
        if refused and done.reason == Draining.reason:
            # It will refuse all that its other credits would bring.
            self._retire(puller)
        if refused:
            self._give_back(puller, done.transfer_id, _error_of(done), done)
            return
        self._groups[puller.group_key].drop(puller, done.transfer_id)
        if not done.reason:
            now_s = time.monotonic()
            self._groups[puller.group_key].pace.note(queued.tokens, now_s - queued.pulled_s, now_s)
        queued.end(_error_of(done) if done.reason else None, done)

    @property
    def _full(self) -> bool:
        return self.depth >= self.max_queued_tasks

    def _full_error(self) -> QueueFull:
        wait_s = max((group.wait_s for group in self._groups.values()), default=0.0)
        return QueueFull(
            f"the prefill queue holds its {self.max_queued_tasks} tasks already",
            metadata={"queue": "prefill", "maxsize": str(self.max_queued_tasks)},
            retry_after_s=min(_RETRY_AFTER_MAX_S, max(QueueFull.retry_after_s or 0.0, wait_s)),
        )

    def _groups_of(self, model: str) -> tuple[QueueGroup, ...]:
        return tuple(
            group
            for group in self._groups.values()
            if any(model in ("", puller.model) for puller in group.pullers.values())
        )

    def _note_partners(self, group: QueueGroup) -> None:
        if group.pullers:
            self._partners[group.layout] = frozenset(group.pullers)
        else:
            self._partners.pop(group.layout, None)

    def _retire(self, puller: PrefillWorkerStream) -> None:
        """A worker takes nothing more: tasks that only it could take fail."""
        if puller.draining:
            return
        puller.draining = True
        stranded = self._groups[puller.group_key].leave(puller)
        self._note_partners(self._groups[puller.group_key])
        _fail(stranded)

    def _give_back(
        self,
        puller: PrefillWorkerStream,
        transfer_id: str,
        error: HeadraceError,
        done: prefill_pb2.TaskDone | None,
    ) -> None:
        """A task's worker will not end it: another one may, unless the transfer may be open."""
        queued = puller.tasks[transfer_id]
        self._groups[puller.group_key].drop(puller, transfer_id)
        if queued.outcome.done():
            return
        if queued.started or queued.returns_left < 1:
            queued.end(error, done)
            return
        queued.return_from(puller.ref)
        if self._groups[puller.group_key].has_taker(queued):
            _LOG.info("task %s goes back to the queue: %s", transfer_id, error.detail)
            self._groups[puller.group_key].add(queued)
        else:
            _fail((queued,))


def _fail(stranded: Iterable[QueuedTask]) -> None:
    for queued in stranded:
        queued.end(_no_taker(queued.task.transfer_id))


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
