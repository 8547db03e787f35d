"""A decode worker's spans in a request's trace."""

from __future__ import annotations

from opentelemetry.trace import Span, Status, StatusCode

from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import server_attributes
from headrace_common.telemetry.setup import Telemetry
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.canary import Comparison
from headrace_engine.interface import DecodeWork
from headrace_engine.worker.metrics import tier_attributes
from headrace_kv.layout import WorkerRef
from headrace_kv.receive.receiver import IncomingTransfer


def start_attributes(request_id: str, work: DecodeWork, ref: WorkerRef) -> dict[str, str | int]:
    """The attributes of an attempt's span at its start."""
    return {
        schema.ATTRIBUTE_REQUEST_ID: request_id,
        schema.ATTRIBUTE_TRANSFER_ID: work.transfer_id,
        schema.ATTRIBUTE_PROMPT_TOKENS: len(work.token_ids),
        schema.ATTRIBUTE_PLACEMENT: "remote" if work.remote_kv else "local",
        schema.ATTRIBUTE_DECODE_WORKER_ID: ref.worker_id,
        schema.ATTRIBUTE_INCARNATION: ref.incarnation,
        **server_attributes(),
    }


def record_attempt(telemetry: Telemetry, attempt: DecodeAttempt) -> None:
    """Records a span for each step that the attempt began, and ends its own span."""
    span, error, times = attempt.span, attempt.error, attempt.timestamps
    if not span.is_recording():
        return

    def step(
        name: str, start_ns: int, end_ns: int, attributes: dict[str, str | int | float]
    ) -> None:
        failed = error.detail if error is not None and not end_ns else ""
        telemetry.record_span(
            name, span, start_ns, end_ns or times.end_unix_ns, attributes, error=failed
        )

    step(
        schema.SPAN_DECODE_RESERVE,
        times.start_unix_ns,
        times.reserved_unix_ns,
        _reserve_attributes(attempt),
    )
    ready_ns = times.reserved_unix_ns
    if attempt.awaits_kv:
        ready_ns = times.arrived_unix_ns
        step(
            schema.SPAN_DECODE_KV_WAIT,
            times.reserved_unix_ns,
            ready_ns,
            _kv_wait_attributes(attempt),
        )
    if attempt.work.from_hidden_state:
        if attempt.awaits_kv:
            step(
                schema.SPAN_DECODE_HIDDEN_STATE_WAIT,
                times.reserved_unix_ns,
                times.hidden_state_unix_ns,
                {},
            )
        if times.hidden_state_unix_ns:
            step(schema.SPAN_DECODE_SAMPLE, times.hidden_state_unix_ns, times.sampled_unix_ns, {})
        # An answer can end with the token that was sampled from a hidden state.
        over = error is None and not times.first_token_unix_ns
        ready_ns = max(ready_ns, times.sampled_unix_ns) if ready_ns and not over else 0
    elif ready_ns and attempt.work.awaits_first_token:
        received_ns = times.token_received_unix_ns
        received_ns = max(received_ns, ready_ns) if received_ns else 0
        step(schema.SPAN_DECODE_TOKEN_WAIT, ready_ns, received_ns, {})
        ready_ns = received_ns
    if ready_ns:
        wait_ns = times.step_start_unix_ns - ready_ns
        waited: dict[str, str | int | float] = (
            {schema.ATTRIBUTE_DECODE_WAIT_MS: wait_ns / 1e6} if wait_ns > 0 else {}
        )
        step(schema.SPAN_DECODE_FIRST_TOKEN, ready_ns, times.first_token_unix_ns, waited)
    if times.first_token_unix_ns:
        step(
            schema.SPAN_DECODE_GENERATE,
            times.first_token_unix_ns,
            times.last_token_unix_ns if error is None else 0,
            {schema.ATTRIBUTE_COMPLETION_TOKENS: attempt.generated_tokens},
        )
    span.set_attribute(schema.ATTRIBUTE_COMPLETION_TOKENS, attempt.generated_tokens)
    span.set_attribute(schema.ATTRIBUTE_CACHED_TOKENS, attempt.cached_tokens)
    span.set_attributes(tier_attributes(attempt.tier_tokens))
    if error is not None:
        span.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)
        span.set_status(Status(StatusCode.ERROR, error.detail))
    span.end(times.end_unix_ns)


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
    attributes: dict[str, str | int | float] = {
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


def _reserve_attributes(attempt: DecodeAttempt) -> dict[str, str | int | float]:
    reservation = attempt.reservation
    if reservation is None:
        return {}
    return {
        schema.ATTRIBUTE_BLOCKS: len(reservation.block_ids),
        schema.ATTRIBUTE_START_TOKEN: reservation.start_token,
        schema.ATTRIBUTE_TRANSFERRED_TOKENS: reservation.end_token - reservation.start_token,
    }


def _kv_wait_attributes(attempt: DecodeAttempt) -> dict[str, str | int | float]:
    summary = attempt.summary
    if summary is None:
        return {}
    return {
        schema.ATTRIBUTE_EXPECTED_KEYS: summary.acknowledgement_count,
        schema.ATTRIBUTE_PAYLOAD_BYTES: summary.payload_bytes,
        schema.ATTRIBUTE_LOCAL_BYTES: summary.local_bytes,
        schema.ATTRIBUTE_PREFILL_WORKER_ID: summary.prefill.worker_id,
    }
