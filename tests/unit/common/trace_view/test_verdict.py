"""The sentence about the largest part names the culprit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.inference.v1 import trace_pb2
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import Cause, LayerStamps
from headrace_common.trace_view.model import Link, TraceStep, TraceView
from headrace_common.trace_view.reading import read_trace
from headrace_common.trace_view.verdict import verdict

MS = 10**6


def step(name: str, start_ms: int, worker: str = "", error: str = "") -> TraceStep:
    return TraceStep(1, name, name, "router", worker, start_ms * MS, MS, error)


STEPS = (
    step(schema.SPAN_ROUTE, 1),
    step(schema.SPAN_ATTEMPT, 2, error="worker gone"),
    step(schema.SPAN_PREFILL, 3, "prefill-1"),
    step(schema.SPAN_DECODE, 3, "decode-0"),
)


def view(
    part: str, links: tuple[Link, ...] = (), steps: tuple[TraceStep, ...] = STEPS
) -> TraceView:
    parts = {part: 80 * MS, "network": 20 * MS}
    return TraceView("t", "r", 0, True, 100 * MS, 100 * MS, parts, links, steps, prompt_tokens=9)


def write(layer: int, ready_ms: int, cause: Cause = "move") -> LayerStamps:
    ready_ns = ready_ms * MS
    return LayerStamps(layer, *(ready_ns,) * 3, ready_ns + MS, 1_000, cause, 7 * MS)


def link(rank: int, moving_ms: int, writes: tuple[LayerStamps, ...] = ()) -> Link:
    writes = writes or (write(0, 10 + moving_ms),)
    return Link("p", rank, "d", 1, "tcp", "direct", 2_000_000, moving_ms * MS, writes=writes)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("queue", "80.00 ms until a prefill worker had room"),
        ("retry", "80.00 ms of attempts that failed: worker gone"),
        ("first step", "the step on decode-0 took 80.00 ms"),
        ("prefill", "prefill-1 computed for 80.00 ms"),
        ("unaccounted", "no step explains 80.00 ms"),
    ],
)  # fmt: skip
def test_each_part_has_its_words(part: str, sentence: str) -> None:
    assert verdict(view(part)) == f"80 % {part}: {sentence}"


def usual_view(parts_ms: dict[str, int], usual_ms: dict[str, int], **changes: Any) -> TraceView:
    """A request with these parts, among others that have the usual ones."""
    parts, usual = ({name: ms * MS for name, ms in one.items()} for one in (parts_ms, usual_ms))
    total_ns = sum(parts.values())
    made = TraceView("t", "r", 0, True, total_ns, total_ns, parts, (), STEPS[2:], usual=usual)
    return replace(made, **changes)


USUAL = {"prefill": 96, "transfer exposed": 3, "first step": 12, "network": 5}


def test_a_link_that_is_always_slow_is_named() -> None:
    links = (link(0, 80), link(1, 2), link(2, 2))
    always = {**USUAL, "transfer exposed": 80}
    assert "link p/r0 -> d/r1 moved at" in verdict(usual_view(always, always, links=links))


def test_what_the_clocks_may_have_moved_is_not_named() -> None:
    doubtful = usual_view({**USUAL, "network": 30}, USUAL, clock_error_ns=30 * MS)
    assert verdict(doubtful).startswith("nothing unusual")
    largest = {"network": 30 * MS, "prefill": 20 * MS}
    alone = replace(doubtful, parts=largest, usual={}, ttft_ns=50 * MS)
    assert verdict(alone).startswith("40 % prefill")
    known = replace(doubtful, clock_error_ns=20 * MS)
    assert verdict(known).startswith("21 % network, 6 times its usual 5.00 ms")


def test_the_second_token_has_a_culprit_too() -> None:
    second, usual = {"transfer exposed": 90 * MS}, {"transfer exposed": 3 * MS}
    slow = usual_view(USUAL, USUAL, second_parts=second, second_usual=usual)
    assert verdict(slow).startswith("second token: 100 % transfer exposed, 30 times its usual")
    # Little time beside that to the first token.
    second["transfer exposed"] = 15 * MS
    assert verdict(slow).startswith("nothing unusual, 83 % prefill")


def test_a_handshake_is_no_reservation() -> None:
    waited = link(0, 2, (write(3, 5, "lease"),))
    steps = (*STEPS[2:], step(schema.SPAN_DECODE_RESERVE, 10, "decode-0"))
    assert verdict(view("transfer exposed", (waited,), steps)) == (
        "80 % transfer exposed: link p/r0 -> d/r1 waited 6.00 ms for decode's reservation"
    )


def test_a_refusal_names_its_rule() -> None:
    refused = usual_view(
        {"admission": 1}, {}, steps=(), error="prompt: too long", error_reason="INVALID_REQUEST"
    )
    assert verdict(refused) == "refused after 1.00 ms by INVALID_REQUEST: prompt: too long"
    late = replace(refused, error="too late", error_reason="DEADLINE_EXCEEDED")
    assert verdict(late).startswith("failed: too late; 100 % admission: 1.00 ms until the router")


def test_a_failure_comes_first_and_nothing_is_invented() -> None:
    empty = TraceView("t", "r", 0, False, 0, 0, {}, (), (), error="QUEUE_FULL")
    assert verdict(empty) == "failed: QUEUE_FULL; no times have arrived"


def test_a_request_that_has_not_ended_has_no_parts() -> None:
    first = trace_pb2.Span(name=schema.SPAN_FIRST_TOKEN, span_id="f", parent_span_id="r")
    view = read_trace(trace_pb2.Trace(spans=[first]))
    assert (view.parts, view.ttft_ns) == ({}, 0)
    assert verdict(view) == "no times have arrived"
