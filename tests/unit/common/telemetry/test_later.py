"""Spans that are made after their work, and the headers that name them before."""

from __future__ import annotations

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace_common.config import ServiceConfig
from headrace_common.rpc.trace_context import carrier_of, context_of_carrier
from headrace_common.telemetry import schema
from headrace_common.telemetry.later import SpanMaker
from headrace_common.telemetry.setup import child_context, init_telemetry

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def test_a_span_has_the_parent_and_the_state_of_its_caller() -> None:
    telemetry = init_telemetry("router", "r", ServiceConfig())
    token = otel_context.attach(context_of_carrier(f"{PARENT}01", "vendor=1"))
    try:
        own, parent = telemetry.root_context()
    finally:
        otel_context.detach(token)
    span = SpanMaker(own, 0).at(schema.SPAN_REQUEST, parent, (7, 9), context=own)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" in PARENT
    for context in (span.context, child_context(own)):
        assert context is not None
        assert context.trace_state.to_header() == "vendor=1"


@pytest.mark.parametrize("state", ["", "vendor=1,other=2"])
def test_the_headers_are_those_of_the_standard_propagator(state: str) -> None:
    propagator = TraceContextTextMapPropagator()
    carrier = {"traceparent": f"{PARENT}01", "tracestate": state}
    telemetry = init_telemetry("router", "r", ServiceConfig())
    span = telemetry.start_span("root", propagator.extract(carrier))
    expected: dict[str, str] = {}
    propagator.inject(expected, context=trace.set_span_in_context(span))
    assert carrier_of(span.get_span_context()) == expected
