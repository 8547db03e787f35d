"""Traces as OTLP in JSON, and as objects for programs."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from headrace.inference.v1 import trace_pb2
from headrace_cli.commands.trace import otlp_object, trace_object, write_otlp
from headrace_cli.output import json_text
from headrace_common.errors import ConfigError
from headrace_common.telemetry import schema

RECORDED = Path(__file__).parent / "waterfall" / "golden" / "slow-link.json"
LAYERS, LINKS = 24, 4


@pytest.fixture
def trace() -> trace_pb2.Trace:
    return ParseDict(json.loads(RECORDED.read_text()), trace_pb2.Trace())


def test_otlp_has_every_span_with_its_process(trace: trace_pb2.Trace) -> None:
    made = otlp_object(trace)
    spans = [
        span
        for resource in made["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert len(spans) == len(trace.spans)
    assert {span["traceId"] for span in spans} == {trace.trace_id}
    ids = {span["spanId"] for span in spans}
    assert sum(span.get("parentSpanId", "") not in ids for span in spans) == 1
    names = {
        pair["value"]["stringValue"]
        for resource in made["resourceSpans"]
        for pair in resource["resource"]["attributes"]
    }
    assert {"headrace-router", "headrace-prefill", "prefill-0", "decode-0"} <= names


def decoded(made: dict[str, Any]) -> list[Span]:
    """The spans of an export. OTLP's JSON has hex where protobuf's has base64; all else is the same."""
    spans = [
        span
        for resource in made["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    links = [link for span in spans for link in span.get("links", ())]
    for one in (*spans, *links):
        for key in {"traceId", "spanId", "parentSpanId"} & one.keys():
            one[key] = b64encode(bytes.fromhex(one[key])).decode()
    request = ParseDict(made, trace_service_pb2.ExportTraceServiceRequest())
    return [
        span
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_otlp_has_lists_links_and_texts_that_are_no_numbers() -> None:
    span = trace_pb2.Span(name=schema.SPAN_REQUEST, span_id="01" * 8, linked_span_ids=["02" * 8])
    span.attributes[schema.ATTRIBUTE_CLOCK_WORKER_IDS] = "prefill-0, decode-0"
    span.attributes[schema.ATTRIBUTE_CLOCK_WORKERS_AHEAD_MS] = "3000.5, -2"
    span.attributes[schema.ATTRIBUTE_PROMPT_TOKENS] = "many"
    span.attributes[schema.ATTRIBUTE_CLOCK_ERROR_MS] = "nan"
    made = otlp_object(trace_pb2.Trace(trace_id="ab" * 16, spans=[span]))
    assert "NaN" not in json.dumps(made)
    (one,) = decoded(made)
    values = {pair.key: pair.value for pair in one.attributes}
    workers = values[schema.ATTRIBUTE_CLOCK_WORKER_IDS].array_value.values
    assert [value.string_value for value in workers] == ["prefill-0", "decode-0"]
    ahead = values[schema.ATTRIBUTE_CLOCK_WORKERS_AHEAD_MS].array_value.values
    assert [value.double_value for value in ahead] == [3000.5, -2.0]
    assert values[schema.ATTRIBUTE_PROMPT_TOKENS].string_value == "many"
    assert values[schema.ATTRIBUTE_CLOCK_ERROR_MS].string_value == "nan"
    (link,) = one.links
    assert (link.trace_id.hex(), link.span_id.hex()) == ("ab" * 16, "02" * 8)


def test_the_object_has_the_message_the_sum_and_the_links(trace: trace_pb2.Trace) -> None:
    made = trace_object(trace)
    assert made["trace_id"] == trace.trace_id
    assert len(made["spans"]) == len(trace.spans)
    assert made["ttft_ns"] == sum(part["duration_ns"] for part in made["parts"])
    assert len(made["links"]) == LINKS
    assert made["verdict"].startswith("82 % transfer exposed: ")
    assert json.loads(json_text(made)) == made


def test_a_file_is_written_and_a_wrong_folder_is_named(
    trace: trace_pb2.Trace, tmp_path: Path
) -> None:
    write_otlp(trace, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == otlp_object(trace)
    with pytest.raises(ConfigError, match=r"--otlp .*cannot be written"):
        write_otlp(trace, tmp_path / "gone" / "file")
