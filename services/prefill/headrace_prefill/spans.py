"""A prefill worker's spans in a request's trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span, Status, StatusCode

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import HeadraceError
from headrace_common.rpc.trace_context import context_from_traceparent
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry
from headrace_engine.interface import PrefillOutcome
from headrace_engine.worker.metrics import tier_attributes
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import SendReport
from headrace_prefill.link_spans import LinkSpans
from headrace_prefill.prefix_fetch import FetchRecord


@dataclass(frozen=True, slots=True)
class EndedTask:
    """A task that has ended, with what the ranks report about its transfer. `outcome` is None after an error."""

    task: prefill_pb2.PrefillTask
    outcome: PrefillOutcome | None
    reports: Sequence[SendReport]
    error: HeadraceError | None
    start_unix_ns: int
    end_unix_ns: int
    fetch: FetchRecord | None = None


def record_task(telemetry: Telemetry, ref: WorkerRef, ended: EndedTask, links: LinkSpans) -> None:
    """Records the spans of a task, of its computation, and of every link of its transfer."""
    task, outcome, reports, error = ended.task, ended.outcome, ended.reports, ended.error
    span = telemetry.start_span(
        schema.SPAN_PREFILL,
        context_from_traceparent(task.traceparent),
        start_unix_ns=ended.start_unix_ns,
        attributes={
            schema.ATTRIBUTE_REQUEST_ID: task.request_id,
            schema.ATTRIBUTE_TRANSFER_ID: task.transfer_id,
            schema.ATTRIBUTE_PREFILL_WORKER_ID: ref.worker_id,
            schema.ATTRIBUTE_INCARNATION: ref.incarnation,
            schema.ATTRIBUTE_PROMPT_TOKENS: len(task.token_ids),
            schema.ATTRIBUTE_START_TOKEN: task.start_token,
        },
    )
    if not span.is_recording():
        return
    if reports:
        sent_bytes = sum(report.payload_bytes for report in reports)
        span.set_attribute(schema.ATTRIBUTE_PAYLOAD_BYTES, sent_bytes)
        control_bytes = sum(report.control_bytes for report in reports)
        span.set_attribute(schema.ATTRIBUTE_CONTROL_BYTES, control_bytes)
        detail = error.detail if error is not None else ""
        span.set_attributes(links.record(span, task.decode_worker_id, reports, detail))
    if ended.fetch is not None:
        _record_fetch(telemetry, span, ended.fetch)
    if outcome is not None:
        span.set_attribute(schema.ATTRIBUTE_CACHED_TOKENS, outcome.cached_tokens)
        span.set_attributes(tier_attributes(outcome.tier_tokens))
        telemetry.record_span(
            schema.SPAN_PREFILL_COMPUTE,
            span,
            outcome.compute_start_unix_ns,
            outcome.compute_end_unix_ns,
            {
                schema.ATTRIBUTE_TOKENS: len(task.token_ids)
                - outcome.cached_tokens
                - outcome.fetched_tokens,
                schema.ATTRIBUTE_CACHED_TOKENS: outcome.cached_tokens,
            },
        )
    if error is not None:
        span.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)
        span.set_status(Status(StatusCode.ERROR, error.detail))
    span.end(ended.end_unix_ns)


def _record_fetch(telemetry: Telemetry, parent: Span, fetch: FetchRecord) -> None:
    attributes: dict[str, str | int] = {
        schema.ATTRIBUTE_TOKENS: fetch.token_count,
        schema.ATTRIBUTE_PAYLOAD_BYTES: fetch.payload_bytes,
    }
    if fetch.reason:
        attributes[schema.ATTRIBUTE_ERROR_REASON] = fetch.reason
    times = (fetch.start_unix_ns, fetch.end_unix_ns)
    telemetry.record_span(schema.SPAN_PREFIX_FETCH, parent, *times, attributes)
