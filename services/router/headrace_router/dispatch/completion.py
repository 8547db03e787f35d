"""The end of a response: its usage and timing."""

from __future__ import annotations

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.durations import duration_from_ns
from headrace_common.latency.breakdown import breakdown_to_proto
from headrace_common.telemetry import schema
from headrace_router.dispatch.attempt import Attempt, AttemptOutcome
from headrace_router.dispatch.first_token import MAKER_NAMES
from headrace_router.dispatch.request import RoutedRequest


def finish_response(
    request: RoutedRequest,
    outcome: AttemptOutcome,
    attempt: Attempt | None,
    *,
    attempts: int,
) -> None:
    """Ends the response. `attempt` is the last one, or None if the client had every token already."""
    response = request.response
    now_unix_ns = response.now_unix_ns()
    first_unix_ns = response.first_token_unix_ns or now_unix_ns
    last_unix_ns = response.last_token_unix_ns or now_unix_ns
    prefill_worker = attempt.prefill_worker if attempt is not None else None
    usage = inference_pb2.Usage(
        prompt_tokens=len(request.prepared.token_ids),
        completion_tokens=response.completion_tokens,
        decode_cached_tokens=outcome.cached_tokens,
        transferred_tokens=outcome.transferred_tokens,
    )
    timing = inference_pb2.Timing(
        time_to_first_token=duration_from_ns(first_unix_ns - request.arrival_unix_ns),
        total=duration_from_ns(last_unix_ns - request.arrival_unix_ns),
        decode_worker_id=attempt.decode_worker.worker_id if attempt is not None else "",
        prefill_worker_id=prefill_worker.worker_id if prefill_worker else "",
        attempts=attempts,
    )
    if request.prepared.includes_latency:
        timing.latency.CopyFrom(breakdown_to_proto(request.timeline.break_down()))
    response.finish(outcome.reason, usage, timing)
    root = request.root_span
    if response.started:
        root.set_attribute(schema.ATTRIBUTE_FIRST_TOKEN, MAKER_NAMES[response.first_token_by])
    root.set_attribute(schema.ATTRIBUTE_COMPLETION_TOKENS, response.completion_tokens)
    root.set_attribute(schema.ATTRIBUTE_FINISH_REASON, [finish_reason_name(response.finish_reason)])


def finish_reason_name(reason: sampling_pb2.FinishReason.ValueType) -> str:
    """The name of a finish reason in telemetry, such as "length"."""
    return sampling_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
