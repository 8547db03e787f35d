"""Traces as OTLP in JSON, and as objects for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict
from typer.testing import CliRunner

from headrace.inference.v1 import trace_pb2
from headrace_cli.app import app
from headrace_cli.commands.trace import (
    TraceOrder,
    otlp_object,
    show_comparison,
    show_list,
    trace_object,
)
from headrace_cli.output import json_text

RECORDED = Path(__file__).parent / "waterfall" / "golden" / "slow-link.json"
LAYERS, LINKS = 24, 4


@pytest.fixture
def trace() -> trace_pb2.Trace:
    return ParseDict(json.loads(RECORDED.read_text()), trace_pb2.Trace())


def test_otlp_has_every_span_with_its_process(trace: trace_pb2.Trace) -> None:
    made = otlp_object(trace)
    resources = made["resourceSpans"]
    spans = [span for one in resources for scope in one["scopeSpans"] for span in scope["spans"]]
    assert len(spans) == len(trace.spans)
    assert {span["traceId"] for span in spans} == {trace.trace_id}
    ids = {span["spanId"] for span in spans}
    assert sum(span.get("parentSpanId", "") not in ids for span in spans) == 1
    pairs = [pair for one in resources for pair in one["resource"]["attributes"]]
    names = {pair["value"]["stringValue"] for pair in pairs}
    assert {"headrace-router", "headrace-prefill", "prefill-0", "decode-0"} <= names


def test_otlp_has_the_caller(trace: trace_pb2.Trace) -> None:
    called = trace_pb2.Span(span_id="2", parent_span_id="1", trace_state="vendor=x")
    trace.spans.append(called)
    made = otlp_object(trace)["resourceSpans"][-1]["scopeSpans"][0]["spans"][-1]
    assert (made["parentSpanId"], made["traceState"]) == ("1", "vendor=x")


def test_the_object_has_the_message_the_sum_and_the_links(trace: trace_pb2.Trace) -> None:
    made = trace_object(trace)
    assert made["trace_id"] == trace.trace_id
    assert len(made["spans"]) == len(trace.spans)
    assert made["ttft_ns"] == sum(part["duration_ns"] for part in made["parts"])
    assert len(made["links"]) == LINKS
    assert made["verdict"].startswith("82 % transfer exposed: ")
    assert json.loads(json_text(made)) == made


def test_a_comparison_for_programs_has_both_traces(
    trace: trace_pb2.Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    show_comparison([trace, trace], as_json=True)
    assert json.loads(capsys.readouterr().out)["traces"] == [trace_object(trace)] * 2
    refused = CliRunner().invoke(app, ["trace", "compare", "last", "slowest", "--otlp", "file"])
    assert "--otlp writes one trace" in refused.output


def test_a_list_has_what_a_request_was_and_is_sorted(
    trace: trace_pb2.Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    running = trace_pb2.Trace(trace_id="0" * 32, request_id="running")
    running.start_time.CopyFrom(trace.start_time)
    show_list([running, trace], TraceOrder.TTFT, as_json=True)
    first, second = json.loads(capsys.readouterr().out)["traces"]
    assert (first["status"], second["status"]) == ("ok", "running")
    assert first["ttft_ns"] > 0
    assert second["ttft_ns"] is None
    assert "spans" not in first
    assert first["verdict"] == trace_object(trace)["verdict"]
    show_list([running, trace], TraceOrder.TIME, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "running" in lines[3]
    assert first["verdict"] in lines[4]
    assert str(first["prompt_tokens"]) in lines[4]
