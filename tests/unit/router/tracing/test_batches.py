"""Exports are processed in small batches."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from headrace_router.tracing.record import (
    ATTRIBUTES_MAX,
    BATCH_SPANS,
    attributes_as_text,
    span_batches,
)


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


def _export(*parts: ResourceSpans) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest(resource_spans=parts)


def test_batches_contain_every_span_once_and_in_order() -> None:
    counts = [1, BATCH_SPANS, 0, 3 * BATCH_SPANS + 1, 2]
    batches = list(span_batches(_export(_resource("decode", counts), _resource("router", [1]))))
    assert max(len(batch.spans) for batch in batches) <= BATCH_SPANS
    assert len(batches) < 2 * sum(counts) // BATCH_SPANS + len(counts)
    names = [span.name for batch in batches if batch.service == "decode" for span in batch.spans]
    assert names == [str(number) for number in range(sum(counts))]
    assert {(batch.service, batch.worker_id) for batch in batches if batch.spans} == {
        ("decode", "w0"),
        ("router", ""),
    }


@pytest.mark.parametrize(
    "empty", [[ResourceSpans()] * 1_000, [ResourceSpans(scope_spans=[ScopeSpans()] * 1_000)]]
)
def test_the_event_loop_runs_after_each_empty_part(empty: list[ResourceSpans]) -> None:
    assert len(list(span_batches(_export(*empty)))) == 1_000


def test_attributes_are_bounded() -> None:
    pairs = [KeyValue(key=str(number), value=AnyValue(int_value=number)) for number in range(1_000)]
    assert list(attributes_as_text(pairs)) == [str(number) for number in range(ATTRIBUTES_MAX)]
