"""Requests that are not sampled: their traces and metrics, and the spans of the slow and failed ones."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace_common.errors import InvalidRequest
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.prometheus import prometheus_text
from tests.kit.router import Rig
from tests.kit.workers import hand_over, reply
from tests.waiting import until

ROUTER_SPANS = {
    schema.SPAN_REQUEST,
    schema.SPAN_TOKENIZE,
    schema.SPAN_ROUTE,
    schema.SPAN_ATTEMPT,
    schema.SPAN_RESERVE,
    schema.SPAN_QUEUE,
    schema.SPAN_FIRST_TOKEN,
    schema.SPAN_STREAM,
}


async def exported(rig: Rig, spans: InMemorySpanExporter) -> list[str]:
    """The names of the spans that were exported since the last call."""
    rig.telemetry.force_flush()
    names = [span.name for span in spans.get_finished_spans()]
    spans.clear()
    return names


async def test_a_request_that_is_not_sampled_has_a_trace_and_no_spans_are_exported() -> None:
    rig = await Rig(traces_sampler="always_off", slow_trace_s=30.0).start()
    spans = InMemorySpanExporter()
    rig.telemetry.add_exporter(spans)
    try:
        await rig.add_decode(reply("ok"))
        await rig.add_prefill(hand_over)
        await rig.ask(request_id="ordinary")
        await until(lambda: rig.router.traces.get("ordinary").complete)
        trace = rig.router.traces.get("ordinary")
        assert {span.name for span in trace.spans if span.service == "router"} == ROUTER_SPANS
        root = next(span for span in trace.spans if span.name == schema.SPAN_REQUEST)
        assert int(root.attributes[schema.ATTRIBUTE_LATENCY_TOTAL_US]) > 0
        assert not await exported(rig, spans)
        with pytest.raises(InvalidRequest):
            await rig.ask(request_id="failed", model="another")
        await until(lambda: rig.router.traces.get("failed").complete)
        (root,) = rig.router.traces.get("failed").spans
        assert "another" in root.error
        assert root.attributes[schema.ATTRIBUTE_REQUEST_ID] == "failed"
        assert await exported(rig, spans) == [schema.SPAN_REQUEST]
        text = prometheus_text(rig.telemetry.metrics.store.collect())
        assert "gen_ai_server_time_to_first_token_seconds_count" in text
        assert 'headrace_latency_part="route"' in text
    finally:
        await rig.close()
