"""Exports are processed in small batches."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from headrace_common.errors import InvalidRequest
from headrace_common.telemetry import schema
from headrace_router.tracing.batches import (
    ATTRIBUTES_MAX,
    BATCH_ITEMS,
    SpanBatch,
    attributes_as_text,
    read_span,
    span_batches,
)
from headrace_router.tracing.service import SpanCollector


def _resource(service: str, counts: list[int]) -> ResourceSpans:
    """One scope for each count, with spans numbered through."""
    names = {"service.name": f"headrace-{service}", "service.instance.id": "w0"}
    attributes = [
        KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in names.items()
    ]
    numbers = iter(range(sum(counts)))
    scopes = [
        ScopeSpans(spans=[Span(name=str(next(numbers))) for _ in range(count)]) for count in counts
    ]
    return ResourceSpans(resource=Resource(attributes=attributes), scope_spans=scopes)


def _export(*parts: ResourceSpans) -> bytes:
    return ExportTraceServiceRequest(resource_spans=parts).SerializeToString()


def test_batches_contain_every_span_once_and_in_order() -> None:
    counts = [1, BATCH_ITEMS, 0, 3 * BATCH_ITEMS + 1, 2]
    batches = list(span_batches(_export(_resource("decode", counts), _resource("router", [1]))))
    assert max(len(batch.spans) for batch in batches) <= BATCH_ITEMS
    assert len(batches) < 2 * sum(counts) // BATCH_ITEMS + len(counts)
    names = [span.name for batch in batches if batch.service == "decode" for span in batch.spans]
    assert names == [str(number) for number in range(sum(counts))]
    assert {(batch.service, batch.worker_id) for batch in batches if batch.spans} == {
        ("decode", "w0"),
        ("router", ""),
    }


@pytest.mark.parametrize(
    "empty", [[ResourceSpans()] * 1_000, [ResourceSpans(scope_spans=[ScopeSpans()] * 1_000)]]
)
def test_empty_messages_count_too(empty: list[ResourceSpans]) -> None:
    assert len(list(span_batches(_export(*empty)))) == 1_000 // BATCH_ITEMS


def test_attributes_are_bounded() -> None:
    pairs = [KeyValue(key=str(number), value=AnyValue(int_value=number)) for number in range(1_000)]
    assert list(attributes_as_text(pairs)) == [str(number) for number in range(ATTRIBUTES_MAX)]


def _span(name: str, **fields: Any) -> Span:
    return Span(trace_id=b"t" * 16, span_id=b"s" * 8, name=name, **fields)


@pytest.mark.parametrize(
    "span",
    [
        _span(schema.SPAN_DECODE, parent_span_id=b"p" * 8, kind=Span.SPAN_KIND_SERVER),
        _span(schema.SPAN_REQUEST),
        _span("not ours", parent_span_id=b"p" * 8),
        _span("n" * 300),
        _span(schema.SPAN_DECODE, trace_state="x=y", parent_span_id=b"p" * 8),
        _span(""),
        Span(trace_id=b"t", span_id=b"s", name=schema.SPAN_DECODE),
        Span(name=schema.SPAN_DECODE),
        Span(),
    ],
)
def test_a_span_is_read_without_its_other_fields(span: Span) -> None:
    read = read_span(span.SerializeToString())
    assert read[:4] == (span.trace_id, span.span_id, span.parent_span_id, span.name)
    assert read.parse() == span


def test_fields_of_a_newer_version_are_skipped() -> None:
    unknown = b"\x50\x96\x01" + b"\x59" + 8 * b"u" + b"\x5d" + 4 * b"u" + b"\xa2\x06\x03abc"
    (whole,) = span_batches(_export(_resource("decode", [3])))
    scope = b"".join(b"\x12" + bytes((len(s.content),)) + s.content + unknown for s in whole.spans)
    resource = _resource("decode", []).SerializeToString() + unknown
    part = resource + b"\x12" + bytes((len(scope) & 0x7F | 0x80, len(scope) >> 7)) + scope
    export = unknown + b"\x0a" + bytes((len(part) & 0x7F | 0x80, len(part) >> 7)) + part + unknown
    assert list(span_batches(export)) == [whole]


async def test_an_export_that_is_cut_anywhere_is_refused_or_lacks_whole_fields() -> None:
    received: list[SpanBatch] = []
    first = _export(_resource("decode", [2, 1]))
    export = first + _export(_resource("prefill", [5]))
    refused = 0
    for size in range(len(export)):
        try:
            await SpanCollector(received.append).collect(export[:size])
        except InvalidRequest:
            refused += 1
    # An empty export is whole, and one that is cut between two parts.
    assert refused == len(export) - 2
    whole = {span for batch in span_batches(first) for span in batch.spans}
    assert {span for batch in received for span in batch.spans} == whole


@pytest.mark.parametrize(
    "export", [b"\x0a\xff" + 10 * b"\xff", b"\x0b", b"\x0a\x02\x0a\x7f", b"\xff"]
)
async def test_an_export_that_is_no_message_is_refused(export: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be parsed"):
        await SpanCollector(lambda batch: None).collect(export)
