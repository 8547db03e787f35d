"""A decode worker's spans in a request's trace."""

from __future__ import annotations

from typing import TypeAlias

from opentelemetry.trace import Span, Status, StatusCode

from headrace_common.latency.steps import DecodeSteps, FirstTokenBy, decode_steps
from headrace_common.rpc.trace_context import SERVED
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import decode_intervals, server_attributes
from headrace_common.telemetry.setup import Telemetry
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.canary import Comparison
from headrace_engine.interface import DecodeWork
from headrace_engine.worker.metrics import tier_attributes
from headrace_kv.layout import WorkerRef
from headrace_kv.receive.receiver import IncomingTransfer

Attributes: TypeAlias = dict[str, str | int | float]


def start_attributes(request_id: str, work: DecodeWork, ref: WorkerRef) -> dict[str, str | int]:
    """The attributes of an attempt's span at its start."""
    return {
        schema.ATTRIBUTE_REQUEST_ID: request_id,
        schema.ATTRIBUTE_TRANSFER_ID: work.transfer_id,
        schema.ATTRIBUTE_PROMPT_TOKENS: len(work.token_ids),
        schema.ATTRIBUTE_PLACEMENT: "remote" if work.remote_kv else "local",
        schema.ATTRIBUTE_DECODE_WORKER_ID: ref.worker_id,
        schema.ATTRIBUTE_INCARNATION: ref.incarnation,
        **server_attributes(SERVED.get()),
    }


def record_attempt(telemetry: Telemetry, attempt: DecodeAttempt) -> None:
    """Records a span for each step that the attempt began, and ends its own span."""
    span, error, times = attempt.span, attempt.error, attempt.timestamps
    if not span.is_recording():
        return

    def record(name: str, start_us: int, end_us: int, attributes: Attributes) -> None:
        failed = error.detail if error is not None and not end_us else ""
        start_ns, end_ns = times.unix_ns(start_us), times.unix_ns(end_us or times.end_us)
        telemetry.record_span(name, span, start_ns, end_ns, attributes, error=failed)

    steps = decode_steps(times.steps, 0)
    maker = FirstTokenBy.DECODE
    if attempt.work.awaits_first_token:
        maker = FirstTokenBy.HIDDEN if attempt.work.from_hidden_state else FirstTokenBy.PREFILL
    for name, start_us, end_us in decode_intervals(steps, maker, awaits_kv=attempt.awaits_kv):
        # An answer can end with a token that was sampled from a hidden state.
        if end_us or error is not None:
            record(name, start_us, end_us or 0, _attributes_of(name, start_us, attempt, steps))
    if steps.first_token:
        end_us = times.last_token_us if error is None else 0
        generated: Attributes = {schema.ATTRIBUTE_COMPLETION_TOKENS: attempt.generated_tokens}
        record(schema.SPAN_DECODE_GENERATE, steps.first_token, end_us, generated)
    span.set_attribute(schema.ATTRIBUTE_COMPLETION_TOKENS, attempt.generated_tokens)
    span.set_attribute(schema.ATTRIBUTE_CACHED_TOKENS, attempt.cached_tokens)
    span.set_attributes(tier_attributes(attempt.tier_tokens))
    if error is not None:
        span.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)
        span.set_status(Status(StatusCode.ERROR, error.detail))
    span.end(times.unix_ns(times.end_us))


def record_transfer(telemetry: Telemetry, span: Span, transfer: IncomingTransfer) -> None:
    """Records the states of an attempt's transfer, once it is in the last one. `span` may have ended."""
    if not span.get_span_context().trace_flags.sampled:
        return
    transitions = transfer.states.transitions
    telemetry.record_span(
        schema.SPAN_TRANSFER,
        span,
        transitions[0][1],
        transitions[-1][1],
        {schema.ATTRIBUTE_TRANSFER_ID: transfer.transfer_id},
        error=transfer.error.detail if transfer.error is not None else "",
        events=[
            (
                schema.EVENT_TRANSFER_STATE,
                unix_ns,
                {schema.ATTRIBUTE_TRANSFER_STATE: state.value},
            )
            for state, unix_ns in transitions
        ],
    )


def record_comparison(telemetry: Telemetry, comparison: Comparison) -> None:
    """Records a comparison in the trace of its request. The spans of the request have ended."""
    if not comparison.span.get_span_context().trace_flags.sampled or not comparison.block_count:
        return
    attributes: Attributes = {
        schema.ATTRIBUTE_TRANSFER_ID: comparison.transfer_id,
        schema.ATTRIBUTE_PREFILL_WORKER_ID: comparison.prefill.worker_id,
        schema.ATTRIBUTE_CANARY_BLOCKS: comparison.block_count,
        schema.ATTRIBUTE_CANARY_OUTCOME: comparison.outcome,
    }
    difference = comparison.difference
    if difference is not None:
        attributes[schema.ATTRIBUTE_CANARY_LAYER] = str(difference.layer)
        attributes[schema.ATTRIBUTE_CANARY_HEAD] = str(difference.head)
        attributes[schema.ATTRIBUTE_CANARY_ERROR] = difference.error
    telemetry.record_span(
        schema.SPAN_DECODE_CANARY,
        comparison.span,
        comparison.start_unix_ns,
        comparison.end_unix_ns,
        attributes,
        error="" if difference is None else str(difference),
    )


def _attributes_of(
    name: str, start_us: int, attempt: DecodeAttempt, steps: DecodeSteps
) -> Attributes:
    reservation, summary = attempt.reservation, attempt.summary
    if name == schema.SPAN_DECODE_RESERVE and reservation is not None:
        return {
            schema.ATTRIBUTE_BLOCKS: len(reservation.block_ids),
            schema.ATTRIBUTE_START_TOKEN: reservation.start_token,
            schema.ATTRIBUTE_TRANSFERRED_TOKENS: reservation.end_token - reservation.start_token,
        }
    if name == schema.SPAN_DECODE_KV_WAIT and summary is not None:
        return {
            schema.ATTRIBUTE_EXPECTED_KEYS: summary.acknowledgement_count,
            schema.ATTRIBUTE_PAYLOAD_BYTES: summary.payload_bytes,
            schema.ATTRIBUTE_LOCAL_BYTES: summary.local_bytes,
            schema.ATTRIBUTE_PREFILL_WORKER_ID: summary.prefill.worker_id,
        }
    if name == schema.SPAN_DECODE_FIRST_TOKEN and (steps.step_start or 0) > start_us:
        return {schema.ATTRIBUTE_DECODE_WAIT_MS: ((steps.step_start or 0) - start_us) / 1e3}
    return {}
