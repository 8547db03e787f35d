"""The prefill queue of one router: prompts wait here until a prefill worker has room.

Workers grant credits, so the queue decides as late as possible which worker computes a prompt. It chooses the worker
with the fewest tokens to compute, including the tasks that the worker already has.

A task of a lost worker goes to another worker as long as the transfer is unopened: the reservation on the decode worker
is still valid. Once the transfer may be open, the attempt fails. To treat an opened transfer as unopened is harmless,
because a decode worker admits one sender incarnation to a transfer and rejects others.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from headrace.prefill.v1 import prefill_pb2
from headrace_common.callers.priority import Priority
from headrace_common.errors import (
    Draining,
    HeadraceError,
    InvalidRequest,
    QueueFull,
    WorkerGone,
    from_reason,
)
from headrace_common.registry.adapters import Adapter
from headrace_common.time_model.model import TimeModel, mean_model, time_model_from_proto
from headrace_frontend.admission.fair_share import tenant_weight
from headrace_frontend.tenants import DEFAULT_TENANT
from headrace_kv.compatibility import fingerprint
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.prefill_queue.group import QueueGroup
from headrace_router.prefill_queue.pairs import Pairing
from headrace_router.prefill_queue.task import QueuedTask, SignTask, TaskTerms, sent_tokens
from headrace_router.prefill_queue.worker_stream import ConnectedWorkers, PrefillWorkerStream
from headrace_router.workers.table import NO_TIMES

_LOG = logging.getLogger(__name__)

_RETRY_AFTER_MAX_S: Final = 60.0
# A fraction of the time that a prefix of a thousand tokens saves.
_PREFIX_WAIT_S: Final = 0.05
# With these a worker rejects a task that it has not started.
_REJECTIONS: Final = (Draining.reason, QueueFull.reason)


class PrefillQueue:
    """Classes take turns by their weights, and so do the tenants of a class. What counts is tokens that are computed.

    The tasks of a tenant in a class are ordered by deadline, then arrival. Returned tasks go before these.

    When another worker has room, a task still waits once, for at most `prefix_wait_s`, for a worker that has its
    prefix. One event loop owns the queue. `sign` makes the handoff ticket of each task that is sent. `pairs` states
    which workers may take a task, and what their places cost. `tenant_weights` returns the weights, and a tenant
    without one weighs 1.
    """

    def __init__(
        self,
        max_queued_tasks: int,
        prefix_wait_s: float = _PREFIX_WAIT_S,
        *,
        sign: SignTask,
        pairs: Pairing | None = None,
        tenant_weights: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.max_queued_tasks = max_queued_tasks
        self._prefix_wait_s = prefix_wait_s
        self._sign = sign
        self.pairs = pairs or Pairing()
        self.workers = ConnectedWorkers()
        self._tenant_weight = lambda tenant: tenant_weight(tenant_weights(), tenant)
        self._groups: dict[KvLayout, QueueGroup] = {}
        self._numbers = itertools.count(1)

    @property
    def depth(self) -> int:
        """The number of tasks that wait for a worker."""
        return sum(len(group.tasks) for group in self._groups.values())

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens of these tasks."""
        return sum(group.tasks.tokens for group in self._groups.values())

    def wait_s(
        self,
        model: str = "",
        priority: Priority = Priority.NORMAL,
        tenant: str | None = None,
    ) -> float:
        """How long a task of a tenant and class that came now would wait, or one behind all tasks of the class.

        Of several layouts, the shortest wait. 0 while a worker has room, infinite while the queue is full. A task waits
        until the tokens before it are computed, and at least for the age of the oldest task.
        """
        if not self._groups:
            return 0.0
        waiting = [group.tasks for group in self._groups.values()]
        if sum([len(tasks) + tasks.expected for tasks in waiting]) >= self.max_queued_tasks:
            return math.inf
        return min([one.wait_s(priority, tenant) for one in self._groups_of(model)], default=0.0)

    def depths(self, model: str = "") -> dict[str, int]:
        """The number of tasks of each class that wait, by its name: of one served model, or of all."""
        groups = self._groups_of(model)
        return {
            one.label: sum(len(group.tasks.of_class(one).tasks) for group in groups)
            for one in Priority
        }

    def oldest_ages_s(self) -> dict[str, float]:
        """The age of the oldest task of each class, by its name."""
        tasks = [group.tasks for group in self._groups.values()]
        return {
            one.label: max((each.of_class(one).oldest_age_s for each in tasks), default=0.0)
            for one in Priority
        }

    def mean_times(self, model: str, age_max_s: float = math.inf) -> TimeModel:
        """What the mean prefill worker of a served model has learned. Reports older than `age_max_s` do not count."""
        now_s = time.monotonic()
        means = [group.times.mean(now_s, age_max_s) for group in self._groups_of(model)]
        known = [one for one in means if one.steps.knows_prompts]
        return mean_model(known) if len(known) > 1 else (*known, NO_TIMES)[0]

    def compute_s_per_token(self, model: str) -> float:
        """How long a prefill worker of a served model computes a token of a usual prompt. 0 while unknown."""
        now_s = time.monotonic()
        return max((group.times.token_s(now_s) for group in self._groups_of(model)), default=0.0)

    def expect_task(
        self,
        layout: KvLayout,
        tokens: int,
        priority: Priority = Priority.NORMAL,
        tenant: str = DEFAULT_TENANT,
    ) -> Callable[[], None]:
        """Counts a prompt that will be queued once its blocks are reserved, until the result is called, once.

        Without it, all prompts that arrive during one reservation would see the same short queue.
        """
        group = self._groups.get(fingerprint(layout))
        if group is None:
            return lambda: None
        group.tasks.expect(1, tokens, priority, tenant)
        return partial(group.tasks.expect, -1, tokens, priority, tenant)

    def enqueue(
        self, task: prefill_pb2.PrefillTask, *, layout: KvLayout, terms: TaskTerms
    ) -> QueuedTask:
        """Adds a task for a decode worker of `layout`.

        Raises QueueFull, or WorkerGone when no connected worker may take the task.
        """
        if self.depth >= self.max_queued_tasks:
            wait_s = max((group.wait_s() for group in self._groups.values()), default=0.0)
            raise QueueFull(
                f"the prefill queue holds its {self.max_queued_tasks} tasks already",
                metadata={"queue": "prefill", "maxsize": str(self.max_queued_tasks)},
                retry_after_s=min(_RETRY_AFTER_MAX_S, max(QueueFull.retry_after_s or 0.0, wait_s)),
            )
        group = self._groups.get(fingerprint(layout))
        if group is None:
            raise _no_eligible_worker(task.transfer_id)
        decode = WorkerRef(task.decode_worker_id, task.decode_incarnation)
        queued = QueuedTask(
            task=task,
            group_key=group.layout,
            terms=terms,
            number=next(self._numbers),
            cancel=self.cancel,
            fits_pair=self.pairs.fits(decode),
            extra_tokens=_extra_tokens(self.pairs, decode, group, sent_tokens(task)),
        )
        group.exclude_unfit_workers(queued)
        if not group.has_eligible_worker(queued):
            raise _no_eligible_worker(task.transfer_id)
        queued.joined_queue(group.tasks.before(queued))
        if terms.divide_gain and (parts := group.division(queued, terms.divide_gain)):
            own = replace(terms, returns_max=0)
            for one, stream in _divided(queued, parts, own, self._numbers):
                group.send(one, stream)
        else:
            group.add(queued)
        return queued

    def add_worker(
        self,
        ref: WorkerRef,
        model: str,
        layout: KvLayout,
        adapters: frozenset[Adapter] = frozenset(),
    ) -> PrefillWorkerStream:
        """A worker has opened its stream. Raises DuplicateTransfer when this incarnation has one already."""
        stream = PrefillWorkerStream(ref, model, layout, next(self._numbers), self._sign, adapters)
        key = stream.group_key
        self.workers.add(stream)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = QueueGroup(
                key, layout.token_bytes, self._prefix_wait_s, self._tenant_weight, self.end_wait
            )
        group.add_worker(stream)
        self._update_pulling(group)
        _LOG.info("prefill worker %s pulls", ref)
        return stream

    def remove_worker(self, stream: PrefillWorkerStream) -> None:
        """A worker's stream has ended.

        Its unopened tasks go to the front. They fail like its other tasks after too many returns, or when no other
        worker may take them.
        """
        self.workers.remove(stream)
        _LOG.info("prefill worker %s pulls no more, %d tasks left", stream.ref, len(stream.tasks))
        self._retire(stream)
        self._group_of(stream).times.remove(stream.ref)
        for transfer_id, queued in tuple(stream.tasks.items()):
            error = WorkerGone(
                f"prefill worker {stream.ref} vanished with task {transfer_id}",
                metadata={"worker_id": stream.ref.worker_id, "transfer_id": transfer_id},
            )
            self._return_or_fail(stream, queued, error, None)
        if self._group_of(stream).close_stream():
            del self._groups[stream.group_key]

    def restrict(self, refs: frozenset[WorkerRef]) -> None:
        """From now on, these workers get only tasks that no other worker may take."""
        if not self.workers.restrict(refs):
            return
        for group in self._groups.values():
            group.restrict(refs)
            self._update_pulling(group)

    def add_credits(self, stream: PrefillWorkerStream, task_count: int) -> None:
        """A worker can take more tasks. Raises ProtocolViolation beyond CREDITS_MAX."""
        self._group_of(stream).add_credits(stream, task_count)

    def end_wait(self, queued: QueuedTask) -> None:
        """A task has waited long enough for a worker that has its prefix."""
        self._groups[queued.group_key].end_wait(queued)

    def task_started(self, stream: PrefillWorkerStream, transfer_id: str) -> None:
        """A worker is about to open a task's transfer. From now on no other worker can compute the task."""
        queued = stream.tasks.get(transfer_id)
        if queued is None:
            _LOG.warning("prefill worker %s started unknown task %s", stream.ref, transfer_id)
        else:
            queued.started()

    def first_token_made(self, stream: PrefillWorkerStream, first: prefill_pb2.FirstToken) -> None:
        """A worker made a task's first token. Repeats are ignored."""
        queued = stream.tasks.get(first.transfer_id)
        if queued is None or not queued.task.HasField("sampling"):
            _LOG.warning(
                "prefill worker %s made a token of task %s unasked", stream.ref, first.transfer_id
            )
        else:
            queued.first_token_made(first)

    def task_ended(self, stream: PrefillWorkerStream, done: prefill_pb2.TaskDone) -> None:
        """A worker ended a task. An unknown task is logged only."""
        queued = stream.tasks.get(done.transfer_id)
        if queued is None:
            _LOG.warning("prefill worker %s ended unknown task %s", stream.ref, done.transfer_id)
            return
        group = self._group_of(stream)
        if not done.reason:
            group.task_succeeded(stream, queued, done.cached_tokens)
            if done.HasField("time_model"):
                self.report_times(stream, time_model_from_proto(done.time_model, str(stream.ref)))
            queued.end(None, done)
            return
        _LOG.info("task %s failed on %s: %s", done.transfer_id, stream.ref, done.detail)
        if queued.has_started or done.reason not in _REJECTIONS:
            group.task_ended(stream, queued)
            queued.end(_error_of(done), done)
            return
        if done.reason == Draining.reason:
            # The worker would reject all tasks that its other credits bring.
            self._retire(stream)
        self._return_or_fail(stream, queued, _error_of(done), done)

    def report_times(self, stream: PrefillWorkerStream, times: TimeModel) -> None:
        """A worker has learned something."""
        self._group_of(stream).times.report(stream.ref, times, time.monotonic())

    def cancel(self, queued: QueuedTask) -> None:
        """Removes a task, or asks its worker to stop. Ends it with WorkerGone."""
        transfer_id = queued.task.transfer_id
        if queued.worker is None:
            group = self._groups.get(queued.group_key)
            if group is not None:
                group.remove(queued)
        elif not queued.outcome.done():
            stream = self.workers.get(queued.worker)
            if stream is not None:
                stream.send_cancel(transfer_id)
        queued.settle(WorkerGone("the task was given up", metadata={"transfer_id": transfer_id}))

    def _group_of(self, stream: PrefillWorkerStream) -> QueueGroup:
        return self._groups[stream.group_key]

    def _groups_of(self, model: str) -> tuple[QueueGroup, ...]:
        return tuple(
            group
            for group in self._groups.values()
            if any(model in ("", stream.model) for stream in group.worker_streams.values())
        )

    def _update_pulling(self, group: QueueGroup) -> None:
        self.workers.update_pulling(group.layout, group.worker_streams.values())

    def _retire(self, stream: PrefillWorkerStream) -> None:
        """Assigns the worker no more tasks. Fails the tasks that no other worker may take."""
        if stream.retired:
            return
        group = self._group_of(stream)
        stranded = group.retire_worker(stream)
        self._update_pulling(group)
        _fail(stranded)

    def _return_or_fail(
        self,
        stream: PrefillWorkerStream,
        queued: QueuedTask,
        error: HeadraceError,
        done: prefill_pb2.TaskDone | None,
    ) -> None:
        """Queues a task again that its worker will not end, unless its transfer may be open."""
        group = self._group_of(stream)
        group.task_ended(stream, queued)
        if queued.outcome.done() or queued.has_started or queued.returns_left < 1:
            queued.end(error, done)
            return
        queued.returned_from(stream.ref)
        group.exclude_unfit_workers(queued)
        group.tasks.corrected(queued, 0)
        if group.has_eligible_worker(queued):
            _LOG.info("task %s is queued again: %s", queued.task.transfer_id, error.detail)
            group.add(queued)
        else:
            _fail((queued,))


def _extra_tokens(
    pairs: Pairing, decode: WorkerRef, group: QueueGroup, tokens: int
) -> Callable[[WorkerRef], float] | None:
    """Cost of handing `tokens` over by prefill worker, in computed tokens. None when all are equal."""
    far_weight = pairs.far_weight(decode)
    if far_weight is None:
        return None
    times, now_s = group.times, time.monotonic()
    payload_bytes = tokens * group.token_bytes
    return lambda prefill: (
        far_weight(prefill) * tokens
        + times.handover_tokens(prefill, payload_bytes, decode.worker_id, now_s)
    )


def _divided(
    queued: QueuedTask,
    parts: Sequence[tuple[PrefillWorkerStream, int]],
    terms: TaskTerms,
    numbers: Iterator[int],
) -> list[tuple[QueuedTask, PrefillWorkerStream]]:
    """A task, and one for each part before its own, which hands over to the worker of the next. As they are sent."""
    receiver, _ = parts[-1]
    tasks = [(queued, receiver)]
    for stream, token in reversed(parts[:-1]):
        task, message = queued.part_task(token), queued.task.first_part
        task.decode_worker_id = receiver.ref.worker_id
        task.decode_incarnation = receiver.ref.incarnation
        task.decode_endpoint = receiver.member.endpoint
        message.worker_id, message.incarnation = stream.ref.worker_id, stream.ref.incarnation
        message.handoff_ticket, message.end_token = stream.ticket(task), token
        part = queued.divide(task, receiver.ref, terms, next(numbers))
        part.end_on_failure(partial(receiver.send_cancel, task.transfer_id))
        queued, receiver = part, stream
        tasks.insert(0, (part, stream))
    # The second worker expects the first part before it is sent.
    return [tasks[1], tasks[0], *tasks[2:]]


def _fail(stranded: Iterable[QueuedTask]) -> None:
    for queued in stranded:
        queued.end(_no_eligible_worker(queued.task.transfer_id))


def _no_eligible_worker(transfer_id: str) -> WorkerGone:
    return WorkerGone(
        "no prefill worker that may take the task is connected",
        metadata={"transfer_id": transfer_id},
    )


def _error_of(done: prefill_pb2.TaskDone) -> HeadraceError:
    if done.reason == InvalidRequest.reason:
        return InvalidRequest({"prompt": done.detail})
    return from_reason(done.reason, done.detail, metadata={"transfer_id": done.transfer_id})
