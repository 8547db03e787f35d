"""The turns of a conversation: what was computed again, and why."""

from __future__ import annotations

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import timestamp_from_unix_ns
from headrace_common.telemetry import schema
from headrace_common.trace_view.conversation import Turn, turns_of

ID = "c1"


def trace(
    number: int,
    prompt: int,
    cached: int,
    *,
    decode: str = "d0",
    prefill: str = "",
    found: int = 0,
    conversation: str = ID,
    kept: int = 0,
) -> trace_pb2.Trace:
    """One turn with an answer of 100 tokens. `found` are those that the prefill worker had."""
    root = {
        schema.ATTRIBUTE_CONVERSATION_ID: conversation,
        schema.ATTRIBUTE_REQUEST_ID: f"r{number}",
        schema.ATTRIBUTE_PROMPT_TOKENS: str(prompt),
        schema.ATTRIBUTE_CACHED_TOKENS: str(cached),
        schema.ATTRIBUTE_TRANSFERRED_TOKENS: str(prompt - cached if prefill else 0),
        schema.ATTRIBUTE_COMPLETION_TOKENS: "100",
        schema.ATTRIBUTE_KEPT_TOKENS: str(kept),
    }
    attempt = {
        schema.ATTRIBUTE_REQUEST_ID: f"r{number}",
        schema.ATTRIBUTE_DECODE_WORKER_ID: decode,
        schema.ATTRIBUTE_PREFILL_WORKER_ID: prefill,
    }
    spans = [
        trace_pb2.Span(span_id="1", name=schema.SPAN_REQUEST, attributes=root),
        trace_pb2.Span(span_id="2", name=schema.SPAN_ATTEMPT, attributes=attempt),
    ]
    if prefill:
        cache = {schema.ATTRIBUTE_CACHED_TOKENS: str(found)}
        spans.append(
            trace_pb2.Span(
                span_id="3", parent_span_id="2", name=schema.SPAN_PREFILL, attributes=cache
            )
        )
    return trace_pb2.Trace(start_time=timestamp_from_unix_ns(number * 10**9), spans=spans)


def reasons(*traces: trace_pb2.Trace) -> list[str]:
    return [turn.reason for turn in turns_of(traces, ID)]


def test_turns_are_in_order_and_have_their_counts() -> None:
    turns = turns_of(
        [
            trace(2, 5_000, 1_000, prefill="p0", found=3_000),
            trace(1, 1_000, 0, kept=1_088),
            trace(3, 9, 0, conversation="other"),
        ],
        ID,
    )
    assert turns[0] == Turn("r1", 10**9, 1_000, 100, 0, 0, 1_000, "d0", "", kept_tokens=1_088)
    assert turns[1] == Turn("r2", 2 * 10**9, 5_000, 100, 1_000, 4_000, 2_000, "d0", "p0")


def test_a_turn_that_computes_what_is_new_needs_no_reason() -> None:
    assert reasons(trace(1, 2_000, 0), trace(2, 4_000, 2_048)) == ["", ""]
    # The history became shorter, and is cached.
    assert reasons(trace(1, 2_000, 0), trace(2, 1_000, 960)) == ["", ""]


def test_tokens_that_are_computed_again_have_a_reason() -> None:
    away = reasons(trace(1, 2_000, 0), trace(2, 4_000, 0, decode="d1"))
    assert away == ["", "2100 tokens again: placed away from d0"]
    gone = reasons(trace(1, 2_000, 0), trace(2, 4_000, 500))
    assert gone == ["", "1600 tokens again: evicted, or the history changed"]
