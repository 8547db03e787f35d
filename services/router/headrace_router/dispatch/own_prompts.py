"""The prompts of requests that decode workers accept from their own clients."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import trace

from headrace.inference.v1 import latency_pb2, priority_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import (
    DeadlineExceeded,
    DuplicateTransfer,
    HeadraceError,
    InvalidRequest,
    NotFound,
    QueueFull,
    WorkerGone,
)
from headrace_common.identity import is_worker_id
from headrace_common.latency.steps import AttemptSteps
from headrace_common.limits import TRANSFER_ID_CHARACTERS_MAX
from headrace_common.registry.adapters import Adapter, adapter_violations
from headrace_common.rpc.trace_context import context_from_traceparent
from headrace_common.tasks import Recent
from headrace_frontend.request.validation import REQUEST_ID_CHARACTERS_MAX
from headrace_frontend.running.record import now_us
from headrace_frontend.tenants import DEFAULT_TENANT
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.cache_salt import salt_violations
from headrace_router.dispatch.dispatcher import PolicySource, RequestDispatcher
from headrace_router.dispatch.messages import task_to_fill
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.tracing.attempt_record import RoutedAttempt, WorkerClocks
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import Worker
from headrace_text.codec import TextCodec

_TRACEPARENT_CHARACTERS_MAX: Final = 64
_PREFILLED_MAX: Final = 65_536
# After a prompt without a reservation, a decode worker's prompts are refused for so long.
_UNRESERVED_PAUSE_S: Final = 1.0


@dataclass(eq=False, slots=True)
class OwnPrompts:
    """Checks a decode worker's prompt, and queues each transfer once."""

    workers: WorkerDirectory
    queue: PrefillQueue
    dispatcher: RequestDispatcher
    policy: PolicySource
    codecs: Mapping[str, TextCodec]
    start_trace: Callable[[str, str, int], None]
    """Gets the trace id, the request id and the arrival of each prompt."""
    clocks: WorkerClocks
    default_deadline_s: float
    _prefilled: Recent[str, None] = field(
        default_factory=lambda: Recent(_PREFILLED_MAX), init=False
    )
    _paused: dict[WorkerRef, Deadline] = field(default_factory=dict, init=False)
    """The decode workers that had no reservation for a prompt, and the end of the pause of each."""

    async def hand_over(
        self, request: prefill_pb2.EnqueueRequest, remaining_s: float | None
    ) -> prefill_pb2.EnqueueResponse:
        """Queues a prompt, and returns once its KV cache was handed over.

        Raises InvalidRequest, DuplicateTransfer on a repeated call, QueueFull, WorkerGone, DeadlineExceeded, or the
        error of the prefill worker. Cancellation cancels the task.
        """
        arrival_ns = time.monotonic_ns()
        worker = self._worker(WorkerRef(request.worker_id, request.incarnation))
        codec = self.codecs.get(worker.model)
        violations = _violations(request, worker, codec.vocabulary_size if codec else 0)
        if violations:
            raise InvalidRequest(violations)
        limit_s = self.default_deadline_s
        deadline = Deadline.after(limit_s if remaining_s is None else min(remaining_s, limit_s))
        self._reject_unreserved(worker.ref)
        priority = Priority.from_proto(request.priority)
        tenant = request.tenant or DEFAULT_TENANT
        self._reject_slow_queue(worker, priority, tenant)
        span = trace.get_current_span(context_from_traceparent(request.traceparent))
        context = span.get_span_context()
        if context.trace_flags.sampled:
            trace_id = trace.format_trace_id(context.trace_id)
            self.start_trace(trace_id, request.request_id, time.time_ns())
        self._reject_repeated(request.transfer_id)
        asked = TaskTerms(deadline.monotonic_s, priority=priority, tenant=tenant)
        terms = self.dispatcher.task_terms(
            worker, array("I", request.token_ids), request.cache_salt, asked
        )
        task = task_to_fill(
            request, worker, request.token_ids, request.start_token, request.traceparent
        )
        # Decode computes the last token.
        del task.token_ids[-1]
        queued = self.queue.enqueue(task, layout=worker.layout, terms=terms)
        record = RoutedAttempt(now_us(), worker_clocks=self.clocks)
        record.enqueued(queued)
        error = await _ended(queued, deadline)
        if error is not None:
            if isinstance(error, NotFound):
                self._paused = {ref: one for ref, one in self._paused.items() if not one.expired}
                self._paused[worker.ref] = Deadline.after(_UNRESERVED_PAUSE_S)
            raise error
        record.update()
        done = record.done or prefill_pb2.TaskDone()
        return prefill_pb2.EnqueueResponse(
            worker_id=queued.worker.worker_id if queued.worker is not None else "",
            cached_tokens=done.cached_tokens,
            payload_bytes=done.payload_bytes,
            steps=_steps(record, arrival_ns) if request.include_latency else None,
            receipt=done.receipt,
        )

    def _worker(self, ref: WorkerRef) -> Worker:
        """A live decode worker. Raises WorkerGone."""
        worker = self.workers.worker(ref)
        if worker is None:
            raise WorkerGone(
                f"decode worker {ref.worker_id} has left", metadata={"worker_id": ref.worker_id}
            )
        return worker

    def _reject_unreserved(self, ref: WorkerRef) -> None:
        """A prefill worker has begun to compute a prompt when its decode worker answers that it has no reservation.

        So the number of such prompts is bounded. A decode worker that reserves first has none.
        """
        pause = self._paused.get(ref)
        if pause is not None and not pause.expired:
            raise QueueFull(
                f"decode worker {ref.worker_id} had no reservation for another prompt; reserve blocks first",
                metadata={"queue": "prefill", "worker_id": ref.worker_id},
                retry_after_s=pause.remaining_s(),
            )

    def _reject_repeated(self, transfer_id: str) -> None:
        if transfer_id in self._prefilled:
            raise DuplicateTransfer(
                f"the prompt of {transfer_id} was queued before",
                metadata={"transfer_id": transfer_id},
            )
        self._prefilled[transfer_id] = None

    def _reject_slow_queue(self, worker: Worker, priority: Priority, tenant: str) -> None:
        policy = self.policy()
        if not policy.HasField("max_queue_wait"):
            return
        bound_s = seconds_from_duration(policy.max_queue_wait)
        wait_s = self.queue.wait_s(worker.model, priority, tenant)
        if wait_s > bound_s:
            raise QueueFull(
                f"the prefill queue takes {wait_s:.2f} s, and the policy's max_queue_wait is {bound_s:.2f} s; prefill "
                "the prompt on the decode worker",
                metadata={"queue": "prefill"},
            )


async def _ended(queued: QueuedTask, deadline: Deadline) -> HeadraceError | None:
    """The outcome of a task, which ends with this call at the latest. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(deadline.remaining_s()):
            return await asyncio.shield(queued.outcome)
    except TimeoutError:
        raise DeadlineExceeded.waiting_for("a prefill worker") from None
    finally:
        # Has no effect on a task that has ended.
        queued.cancel()


def _steps(attempt: AttemptSteps, arrival_ns: int) -> latency_pb2.TaskSteps:
    """The steps of an Enqueue call until now."""
    arrival_us = arrival_ns // 1_000

    def after_us(time_us: int | None) -> int:
        return 0 if time_us is None else max(1, time_us - arrival_us)

    prefill = attempt.prefill
    steps = latency_pb2.TaskSteps(
        queued_us=after_us(attempt.queued),
        pulled_us=after_us(attempt.pulled),
        sent_us=after_us(time.monotonic_ns() // 1_000),
        clock_error_us=attempt.error_us,
    )
    if prefill is not None:
        for name in ("received", "compute_start", "compute_end", "first_write", "last_write"):
            setattr(steps, f"{name}_us", after_us(getattr(prefill, name)))
    return steps


def _violations(
    request: prefill_pb2.EnqueueRequest, worker: Worker, vocabulary_size: int
) -> dict[str, str]:
    violations = salt_violations(request.cache_salt)
    if request.priority not in priority_pb2.Priority.values():
        violations["priority"] = "must be one of the named values"
    if request.HasField("adapter"):
        adapter = request.adapter
        violations.update(adapter_violations(adapter, "adapter"))
        if not worker.serves(Adapter(adapter.name, adapter.digest)):
            violations["adapter"] = "must be one that the decode worker has announced"
        if not request.cache_salt:
            violations["cache_salt"] = "must not be empty beside an adapter"
    if not 0 < len(request.transfer_id) <= TRANSFER_ID_CHARACTERS_MAX:
        violations["transfer_id"] = f"must be 1 to {TRANSFER_ID_CHARACTERS_MAX} characters"
    if len(request.request_id) > REQUEST_ID_CHARACTERS_MAX:
        violations["request_id"] = f"must be at most {REQUEST_ID_CHARACTERS_MAX} characters"
    if request.tenant and not is_worker_id(request.tenant):
        violations["tenant"] = "must be the name of a tenant"
    if len(request.traceparent) > _TRACEPARENT_CHARACTERS_MAX:
        violations["traceparent"] = f"must be at most {_TRACEPARENT_CHARACTERS_MAX} characters"
    tokens = len(request.token_ids)
    if not 2 <= tokens <= worker.max_model_len:
        violations["token_ids"] = f"must hold 2 to {worker.max_model_len} tokens, not {tokens}"
    elif max(request.token_ids) >= vocabulary_size:
        violations["token_ids"] = (
            f"must be below {vocabulary_size}, the vocabulary of {worker.model}"
        )
    elif request.start_token >= tokens - 1:
        violations["start_token"] = "nothing is missing: the decode worker continues by itself"
    return violations
