"""The sentence about the largest part names the culprit."""

from __future__ import annotations

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
        ("tokenize", "80.00 ms for the template and 9 tokens"),
        ("retry", "80.00 ms of attempts that failed: worker gone"),
        ("batch wait", "the task waited 80.00 ms on prefill-1 for a forward pass"),
        ("first step", "the step on decode-0 took 80.00 ms"),
        ("prefill", "prefill-1 computed for 80.00 ms"),
        ("unaccounted", "no step explains 80.00 ms"),
        ("decode wait", "the request was ready, and decode-0 took 80.00 ms to start a step with it"),
    ],
)  # fmt: skip
def test_each_part_has_its_words(part: str, sentence: str) -> None:
    assert verdict(view(part)) == f"80 % {part}: {sentence}"


def test_a_wait_before_routing_is_for_a_slot() -> None:
    waiting = (step(schema.SPAN_ROUTE, 60), step(schema.SPAN_DECODE, 65, "decode-0"))
    assert verdict(view("decode wait", steps=waiting)) == (
        "80 % decode wait: the decode workers had no free slot for 80.00 ms"
    )


def test_a_layer_that_was_not_moved_names_its_wait() -> None:
    waited = link(0, 2, (write(3, 5), write(4, 9, "gather")))
    assert verdict(view("transfer exposed", (waited,))) == (
        "80 % transfer exposed: layer 4 of link p/r0 -> d/r1 was copied to staging memory for 7.00 ms"
    )


def test_a_failure_comes_first_and_nothing_is_invented() -> None:
    empty = TraceView("t", "r", 0, False, 0, 0, {}, (), (), error="QUEUE_FULL")
    assert verdict(empty) == "failed: QUEUE_FULL; no times have arrived"


def test_a_request_that_has_not_ended_has_no_parts() -> None:
    first = trace_pb2.Span(name=schema.SPAN_FIRST_TOKEN, span_id="f", parent_span_id="r")
    view = read_trace(trace_pb2.Trace(spans=[first]))
    assert (view.parts, view.ttft_ns, view.largest_part) == ({}, 0, None)
