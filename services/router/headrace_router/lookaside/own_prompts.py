"""The prompts of requests that decode workers accept from their own clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from opentelemetry import trace

from headrace.inference.v1 import priority_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import InvalidRequest, QueueFull
from headrace_common.limits import TRANSFER_ID_CHARACTERS_MAX
from headrace_common.registry.adapters import Adapter, adapter_violations
from headrace_common.rpc.trace_context import context_from_traceparent
from headrace_frontend.request.validation import REQUEST_ID_CHARACTERS_MAX
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.cache_salt import salt_violations
from headrace_router.dispatch.dispatcher import PolicySource
from headrace_router.lookaside.prompts import DirectPrompts
from headrace_router.lookaside.steps import task_steps
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.tracing.request_span import trace_id_of
from headrace_router.tracing.timeline import AttemptTimeline
from headrace_router.tracing.worker_clocks import WorkerClocks
from headrace_router.workers.table import Worker
from headrace_text.codec import TextCodec

_TRACEPARENT_CHARACTERS_MAX = 64


class OwnPrompts:
    """Checks a decode worker's prompt, and queues it."""

    def __init__(
        self,
        prompts: DirectPrompts,
        queue: PrefillQueue,
        policy: PolicySource,
        codecs: Mapping[str, TextCodec],
        start_trace: Callable[[str, str, int], None],
        clocks: WorkerClocks,
        *,
        default_deadline_s: float,
    ) -> None:
        """`start_trace` gets the trace id, the request id and the arrival of each prompt."""
        self._prompts = prompts
        self._queue = queue
        self._policy = policy
        self._codecs = codecs
        self._start_trace = start_trace
        self._clocks = clocks
        self._default_deadline_s = default_deadline_s

    async def hand_over(
        self, request: prefill_pb2.EnqueueRequest, remaining_s: float | None
    ) -> prefill_pb2.EnqueueResponse:
        """Queues a prompt, and returns once its KV cache was handed over. Raises as DirectPrompts does."""
        arrival_ns = time.monotonic_ns()
        worker = self._prompts.worker(WorkerRef(request.worker_id, request.incarnation))
        codec = self._codecs.get(worker.model)
        violations = _violations(request, worker, codec.vocabulary_size if codec else 0)
        if violations:
            raise InvalidRequest(violations)
        limit_s = self._default_deadline_s
        deadline = Deadline.after(limit_s if remaining_s is None else min(remaining_s, limit_s))
        priority = Priority.from_proto(request.priority)
        self._reject_slow_queue(worker, priority)
        span = trace.get_current_span(context_from_traceparent(request.traceparent))
        if span.get_span_context().is_valid:
            self._start_trace(trace_id_of(span), request.request_id, time.time_ns())
        task = prefill_pb2.PrefillTask(
            transfer_id=request.transfer_id,
            request_id=request.request_id,
            token_ids=request.token_ids[:-1],
            start_token=request.start_token,
            decode_worker_id=worker.ref.worker_id,
            decode_incarnation=worker.ref.incarnation,
            decode_endpoint=worker.endpoint,
            traceparent=request.traceparent,
            cache_salt=request.cache_salt,
            adapter=request.adapter if request.HasField("adapter") else None,
        )
        timeline = AttemptTimeline(self._clocks)
        response = await self._prompts.hand_over(
            *(task, tuple(request.token_ids), worker, deadline, timeline),
            priority=priority,
        )
        if request.include_latency:
            response.steps.CopyFrom(task_steps(timeline.collect(), arrival_ns))
        return response

    def _reject_slow_queue(self, worker: Worker, priority: Priority) -> None:
        policy = self._policy.policy
        if not policy.HasField("max_queue_wait"):
            return
        bound_s = seconds_from_duration(policy.max_queue_wait)
        wait_s = self._queue.wait_s(worker.model, priority)
        if wait_s > bound_s:
            raise QueueFull(
                f"the prefill queue takes {wait_s:.2f} s, and the policy's max_queue_wait is {bound_s:.2f} s; prefill "
                "the prompt on the decode worker",
                metadata={"queue": "prefill"},
            )


def _violations(
    request: prefill_pb2.EnqueueRequest, worker: Worker, vocabulary_size: int
) -> dict[str, str]:
    violations = salt_violations(request.cache_salt)
    if request.priority not in priority_pb2.Priority.values():
        violations["priority"] = "must be one of the named values"
    if request.HasField("adapter"):
        adapter = request.adapter
        violations.update(adapter_violations(adapter, "adapter"))
        if Adapter(adapter.name, adapter.digest) not in worker.adapters:
            violations["adapter"] = "must be one that the decode worker has announced"
        if not request.cache_salt:
            violations["cache_salt"] = "must not be empty beside an adapter"
    if not 0 < len(request.transfer_id) <= TRANSFER_ID_CHARACTERS_MAX:
        violations["transfer_id"] = f"must be 1 to {TRANSFER_ID_CHARACTERS_MAX} characters"
    if len(request.request_id) > REQUEST_ID_CHARACTERS_MAX:
        violations["request_id"] = f"must be at most {REQUEST_ID_CHARACTERS_MAX} characters"
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
