"""Exports are processed in small batches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from headrace_router.tracing.batches import (
    ATTRIBUTES_MAX,
    BATCH_ITEMS,
    SpanBatch,
    attributes_as_text,
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


def test_batches_contain_every_span_once_and_in_order() -> None:
    counts = [1, BATCH_ITEMS, 0, 3 * BATCH_ITEMS + 1, 2]
    batches = list(span_batches([_resource("decode", counts), _resource("router", [1])]))
    assert max(len(batch.spans) for batch in batches) == BATCH_ITEMS
    names = [span.name for batch in batches if batch.service == "decode" for span in batch.spans]
    assert names == [str(number) for number in range(sum(counts))]
    assert {(batch.service, batch.worker_id) for batch in batches} == {
        ("decode", "w0"),
        ("router", ""),
    }


@pytest.mark.parametrize(
    "empty", [[ResourceSpans()] * 1_000, [ResourceSpans(scope_spans=[ScopeSpans()] * 1_000)]]
)
def test_empty_messages_count_too(empty: list[ResourceSpans]) -> None:
    assert len(list(span_batches(empty))) == 1_000 // BATCH_ITEMS


def test_attributes_are_bounded() -> None:
    pairs = [KeyValue(key=str(number), value=AnyValue(int_value=number)) for number in range(1_000)]
    assert list(attributes_as_text(pairs)) == [str(number) for number in range(ATTRIBUTES_MAX)]


async def test_the_event_loop_runs_between_the_batches_of_an_export() -> None:
    turns = 0
    seen: list[int] = []

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def receive(batch: SpanBatch) -> None:
        seen.append(turns)

    counter = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    request = ExportTraceServiceRequest(resource_spans=[_resource("decode", [10 * BATCH_ITEMS])])
    context: Any = None
    await SpanCollector(receive).Export(request, context)
    counter.cancel()
    assert len(seen) == 10
    assert len(set(seen)) == 10
