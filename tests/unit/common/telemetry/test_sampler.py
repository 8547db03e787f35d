"""Samplers: which traces are recorded."""

from __future__ import annotations

import pytest
from opentelemetry import context as otel_context
from opentelemetry.trace import get_current_span

from headrace_common.config import ServiceConfig
from headrace_common.rpc.trace_context import context_from_traceparent, traceparent
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from tests.ended_spans import ended_spans

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def tracing(name: str) -> Telemetry:
    share = "=0" if name.endswith("ratio") else ""
    return init_telemetry("router", "r", ServiceConfig(traces_sampler=name + share))


def test_spans_of_a_trace_that_is_not_sampled_are_dropped() -> None:
    telemetry = tracing("parentbased_traceidratio")
    spans = ended_spans(telemetry)
    root = telemetry.start_span("root")
    telemetry.record_span("child", root, 1, 2)
    root.end()
    assert not spans
    assert not root.get_span_context().trace_flags.sampled


@pytest.mark.parametrize("flag", ["00", "01"])
def test_a_pending_span_follows_its_parent(flag: str) -> None:
    telemetry = tracing("parentbased_traceidratio")
    parent = get_current_span(context_from_traceparent(PARENT + flag)).get_span_context()
    token = otel_context.attach(context_from_traceparent(PARENT + flag))
    pending = telemetry.pending_span("root")
    otel_context.detach(token)
    found = pending.get_span_context()
    assert (found.trace_id, pending.parent) == (parent.trace_id, parent)
    assert found.span_id != parent.span_id
    assert traceparent(pending).endswith(flag)
