"""A prefill worker's spans in a request's trace."""

from __future__ import annotations

from opentelemetry.trace import Status, StatusCode, set_span_in_context

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import HeadraceError
from headrace_common.rpc.trace_context import context_from_traceparent
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry
from headrace_engine.interface import PrefillOutcome
from headrace_kv.handoff.messages import LayerSent
from headrace_kv.layout.layout import WorkerRef


def record_task(
    telemetry: Telemetry,
    ref: WorkerRef,
    task: prefill_pb2.PrefillTask,
    outcome: PrefillOutcome | None,
    error: HeadraceError | None,
    start_unix_ns: int,
    end_unix_ns: int,
) -> None:
    """Records the spans of a task, of its computation, and of every layer's write."""
    span = telemetry.tracer.start_span(
        schema.SPAN_PREFILL,
        context=context_from_traceparent(task.traceparent),
        start_time=start_unix_ns,
        attributes={
            schema.ATTRIBUTE_REQUEST_ID: task.request_id,
            schema.ATTRIBUTE_TRANSFER_ID: task.transfer_id,
            schema.ATTRIBUTE_PREFILL_WORKER_ID: ref.worker_id,
            schema.ATTRIBUTE_INCARNATION: ref.incarnation,
            schema.ATTRIBUTE_PROMPT_TOKENS: len(task.token_ids),
            schema.ATTRIBUTE_START_TOKEN: task.start_token,
        },
    )
    parent = set_span_in_context(span)
    if outcome is not None:
        span.set_attribute(schema.ATTRIBUTE_CACHED_TOKENS, outcome.cached_tokens)
        span.set_attribute(
            schema.ATTRIBUTE_PAYLOAD_BYTES, sum(sent.payload_bytes for _, sent in outcome.layers)
        )
        span.set_attribute(schema.ATTRIBUTE_CONTROL_BYTES, outcome.control_bytes)
        span.set_attribute(schema.ATTRIBUTE_EXPOSED_MS, exposed_ms(outcome))
        telemetry.record_span(
            schema.SPAN_PREFILL_COMPUTE,
            parent,
            outcome.compute_start_unix_ns,
            outcome.compute_end_unix_ns,
            {
                schema.ATTRIBUTE_TOKENS: len(task.token_ids) - outcome.cached_tokens,
                schema.ATTRIBUTE_CACHED_TOKENS: outcome.cached_tokens,
            },
        )
        for rank, sent in outcome.layers:
            telemetry.record_span(
                schema.SPAN_TRANSFER_LAYER,
                parent,
                sent.start_unix_ns,
                sent.start_unix_ns + sent.duration_ns,
                layer_attributes(rank, sent),
            )
    if error is not None:
        span.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)
        span.set_status(Status(StatusCode.ERROR, error.detail))
    span.end(end_unix_ns)


def layer_attributes(rank: int, sent: LayerSent) -> dict[str, str | int | float]:
    """The attributes of one write."""
    return {
        schema.ATTRIBUTE_LAYER: sent.layer,
        schema.ATTRIBUTE_SOURCE_RANK: rank,
        schema.ATTRIBUTE_DESTINATION_RANK: sent.destination_rank,
        schema.ATTRIBUTE_START_TOKEN: sent.start_token,
        schema.ATTRIBUTE_TOKENS: sent.end_token - sent.start_token,
        schema.ATTRIBUTE_PAYLOAD_BYTES: sent.payload_bytes,
        schema.ATTRIBUTE_RUNS: sent.run_count,
        schema.ATTRIBUTE_ENTRIES: sent.entry_count,
        schema.ATTRIBUTE_TRANSPORT: sent.transport,
        schema.ATTRIBUTE_STRATEGY: sent.strategy,
        schema.ATTRIBUTE_SEND_WAIT_MS: round(
            max(0, sent.start_unix_ns - sent.ready_unix_ns) / 1e6, 3
        ),
    }


def exposed_ms(outcome: PrefillOutcome) -> float:
    """Milliseconds of writing after the last layer was computed, which computing did not hide."""
    if not outcome.layers:
        return 0.0
    last_ready_ns = max(sent.ready_unix_ns for _, sent in outcome.layers)
    last_end_ns = max(sent.start_unix_ns + sent.duration_ns for _, sent in outcome.layers)
    return round(max(0, last_end_ns - last_ready_ns) / 1e6, 3)
