"""Samplers: which traces are recorded."""

from __future__ import annotations

import random
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import get_current_span

from headrace_common.config import TracesSampler
from headrace_common.rpc.trace_context import context_from_traceparent, traceparent
from headrace_common.telemetry.sampler import SAMPLERS, Sampler
from headrace_common.telemetry.spans import EndedSpan, SpanSource, SpanTracer

SOURCE = SpanSource("router", "r", Resource({}))
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


@pytest.mark.parametrize(
    "name, root, sampled_parent, other_parent",
    [
        ("always_on", True, True, True),
        ("always_off", False, False, False),
        ("parentbased_always_on", True, True, False),
        ("parentbased_always_off", False, True, False),
    ],
)
def test_the_name_decides(
    name: TracesSampler, root: bool, sampled_parent: bool, other_parent: bool
) -> None:
    sampler = Sampler(name)
    decisions = [sampler.samples(7, parent) for parent in (None, True, False)]
    assert decisions == [root, sampled_parent, other_parent]


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_a_ratio_decides_as_opentelemetry_does(ratio: float) -> None:
    standard, sampler = TraceIdRatioBased(ratio), Sampler("traceidratio", ratio)
    parent_based = Sampler("parentbased_traceidratio", ratio)
    ids = random.Random(5)
    for _ in range(500):
        trace_id = ids.getrandbits(128)
        decision: Any = standard.should_sample(None, trace_id, "x").decision
        expected = decision.is_sampled()
        assert sampler.samples(trace_id, None) == expected
        assert sampler.samples(trace_id, not expected) == expected
        assert parent_based.samples(trace_id, None) == expected
        assert parent_based.samples(trace_id, not expected) != expected


def test_every_sampler_has_a_decision() -> None:
    assert len(SAMPLERS) == 6
    for name in SAMPLERS:
        Sampler(name, 1.0).samples(1, None)  # type: ignore[arg-type]


def tracing(name: TracesSampler) -> tuple[SpanTracer, list[EndedSpan]]:
    ended: list[EndedSpan] = []
    tracer = SpanTracer(SOURCE, Sampler(name, 0.0))
    tracer.add_sink(lambda source, span: ended.append(span))
    return tracer, ended


@pytest.mark.parametrize("name", ["always_off", "parentbased_always_off", "traceidratio"])
def test_a_trace_that_is_not_sampled_asks_other_processes_for_no_spans(name: TracesSampler) -> None:
    tracer, ended = tracing(name)
    root = tracer.start_span("root")
    tracer.record("child", root, (1, 2), {}, "", ())
    root.end()
    assert ended == []
    header = traceparent(root)
    assert header.endswith("-00")
    context = get_current_span(context_from_traceparent(header)).get_span_context()
    assert context.trace_id == root.get_span_context().trace_id


def test_always_on_records_below_a_parent_that_is_not_sampled() -> None:
    tracer, ended = tracing("always_on")
    root = tracer.start_span("root", context_from_traceparent(f"{PARENT}00"))
    tracer.record("child", root, (1, 2), {}, "", ())
    root.end()
    child, first = ended
    assert child.parent_id == first.span_id
    assert first.parent_id == 0xB7AD6B7169203331
    assert traceparent(root).endswith("-01")


def test_always_off_records_nothing_below_a_sampled_parent() -> None:
    tracer, ended = tracing("always_off")
    root = tracer.start_span("root", context_from_traceparent(f"{PARENT}01"))
    root.end()
    assert ended == []
    assert traceparent(root) == f"{PARENT}00"
