"""Spans: parents, the sampled flag, OTLP's encoding, and the queue in front of an exporter."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from enum import StrEnum

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from headrace_common.rpc.trace_context import (
    context_from_traceparent,
    metadata_with_trace,
    traceparent,
)
from headrace_common.telemetry import schema, span_queue
from headrace_common.telemetry.otlp import export_request, readable_span
from headrace_common.telemetry.otlp_wire import encode_export
from headrace_common.telemetry.span_queue import BATCH_SPANS, QUEUED_SPANS_MAX, SpanQueue
from headrace_common.telemetry.spans import EndedSpan, RecordedSpan, SpanSource, SpanTracer

_SOURCE = SpanSource("router", "router-0", Resource({"service.name": "headrace-router"}))
_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def _tracer() -> tuple[SpanTracer, list[EndedSpan]]:
    ended: list[EndedSpan] = []
    tracer = SpanTracer(_SOURCE)
    tracer.add_sink(lambda source, span: ended.append(span))
    return tracer, ended


def _span(number: int) -> EndedSpan:
    return EndedSpan(1, number, 0, "one", 1, 2, {}, "", ())


def test_a_span_has_the_trace_and_the_id_of_its_parent() -> None:
    tracer, ended = _tracer()
    root = tracer.start_span("root", context_from_traceparent(f"{_PARENT}01"), start_time=5)
    tracer.record("child", root, (9, 7), {"a": 1}, "torn", ())
    root.end(20)
    root.end(30)
    child, first = ended
    assert first.trace_id == child.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert (first.parent_id, first.start_unix_ns, first.end_unix_ns) == (0xB7AD6B7169203331, 5, 20)
    assert child.parent_id == first.span_id
    # A clock that was set does not make a span end before its start.
    assert (child.start_unix_ns, child.end_unix_ns) == (9, 9)


def test_a_parent_that_is_not_sampled_has_no_recorded_children() -> None:
    tracer, ended = _tracer()
    root = tracer.start_span("root", context_from_traceparent(f"{_PARENT}00"))
    tracer.record("child", root, (1, 2), {}, "", ())
    root.end()
    assert ended == []
    assert traceparent(root) == f"{_PARENT}00"


@pytest.mark.parametrize("state", ["", "vendor=1,other=2"])
def test_the_headers_are_those_of_the_standard_propagator(state: str) -> None:
    propagator = TraceContextTextMapPropagator()
    carrier = {"traceparent": f"{_PARENT}01", "tracestate": state}
    tracer, _ = _tracer()
    span = tracer.start_span("root", propagator.extract(carrier))
    expected: dict[str, str] = {}
    propagator.inject(expected, context=trace.set_span_in_context(span))
    own = metadata_with_trace((("a", "b"),), trace.set_span_in_context(span))
    assert own == (("a", "b"), *expected.items())
    assert traceparent(span) == expected["traceparent"]


def test_the_encoding_is_that_of_the_sdk() -> None:
    tracer, ended = _tracer()
    span = tracer.start_span(
        "root", attributes={"text": "ä", "yes": True, "n": -3, "x": 0.5, "list": ["a", "b"]}
    )
    assert isinstance(span, RecordedSpan)
    span.add_event("state", {"to": "free"}, 77)
    span.set_status(Status(StatusCode.ERROR, "torn"))
    tracer.record("child", span, (1, 2), {}, "", ())
    span.end()
    request = export_request([(_SOURCE, one) for one in ended])
    expected = encode_spans([readable_span(_SOURCE, one) for one in ended])
    for one in expected.resource_spans[0].scope_spans[0].spans:
        # Whether the parent is in another process, which this process does not store.
        one.flags = 0
        if not one.status.code:
            one.ClearField("status")
    assert list(request.resource_spans) == list(expected.resource_spans)


def _values(number: int) -> dict[str, AttributeValue]:
    """Attributes at the borders of the encoding's lengths."""
    return {
        f"text {number}": "x" * number,
        "wide": "ä" * number,
        "whole": (1 << (number % 64)) - 1,
        "negative": -(1 << (number % 63)),
        "real": number / 3,
        "yes": bool(number % 2),
        "kind": Fault.SLOW,
        "names": ["a"] * (number % 4),
        "pairs": (number, -number),
        "shares": (0.5, float(number)),
        "k" * (number + 1): number,
    }


class Fault(StrEnum):
    """A text of another type than str."""

    SLOW = "slow"


def test_bytes_are_those_of_the_messages() -> None:
    other = SpanSource("decode", "d0", Resource({"service.name": "headrace-decode", "n": 3}))
    spans = [
        (
            other if number % 3 else _SOURCE,
            EndedSpan(
                *(1 << (number % 128), 1 << (number % 64), number % 2 and 77),
                schema.SPAN_DECODE if number % 2 else "of another",
                *(1_700_000_000_000_000_000 + number, 1_700_000_000_000_000_001 + number),
                *(_values(number), "e" * (number % 200)),
                (("state", number, {"to": "free", "n": number}),) * (number % 3),
                ((1, 2),) * (number % 2),
            ),
        )
        for number in (*range(300), 16_380, 16_400, 70_000)
    ]
    found = ExportTraceServiceRequest.FromString(encode_export(spans))
    assert found == export_request(spans)
    assert encode_export(()) == b""


def test_what_a_message_could_not_hold_is_sent_in_part() -> None:
    """One attribute must not cost the other spans of its export."""
    values: dict[str, AttributeValue] = {"half a character": "a\udc80", "large": 1 << 70}
    span = EndedSpan(1, 2, 0, "one", 1, 2, values, "", ())
    (found,) = (
        ExportTraceServiceRequest.FromString(encode_export([(_SOURCE, span)]))
        .resource_spans[0]
        .scope_spans[0]
        .spans
    )
    assert found.attributes[0].value.string_value == "a?"
    assert found.attributes[1].value.int_value == 0


def test_a_queue_exports_in_order_and_in_batches() -> None:
    batches: list[Sequence[tuple[SpanSource, EndedSpan]]] = []
    blocked = threading.Event()

    def export(spans: Sequence[tuple[SpanSource, EndedSpan]]) -> None:
        blocked.wait(20)
        batches.append(spans)

    queue = SpanQueue(export)
    for number in range(2 * BATCH_SPANS):
        queue.add(_SOURCE, _span(number))
    blocked.set()
    queue.close()
    ids = [span.span_id for batch in batches for _, span in batch]
    assert ids == list(range(2 * BATCH_SPANS))
    assert max(map(len, batches)) <= BATCH_SPANS


def test_a_full_queue_drops_spans_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    exported: list[int] = []
    blocked = threading.Event()

    def export(spans: Sequence[tuple[SpanSource, EndedSpan]]) -> None:
        blocked.wait(20)
        exported.extend(span.span_id for _, span in spans)

    queue = SpanQueue(export)
    for number in range(QUEUED_SPANS_MAX + 2 * BATCH_SPANS):
        queue.add(_SOURCE, _span(number))
    blocked.set()
    queue.flush()
    # The thread may have taken one batch before the queue was full.
    assert QUEUED_SPANS_MAX <= len(exported) <= QUEUED_SPANS_MAX + BATCH_SPANS
    # Then it was full twice.
    assert sum("dropped" in record.getMessage() for record in caplog.records) in (1, 2)
    queue.add(_SOURCE, _span(1))
    queue.close()
    assert exported[-1] == 1


def test_an_export_that_fails_loses_its_batch_only() -> None:
    exported: list[int] = []

    def export(spans: Sequence[tuple[SpanSource, EndedSpan]]) -> None:
        if spans[0][1].span_id == 1:
            raise ValueError("a bug")
        exported.extend(span.span_id for _, span in spans)

    queue = SpanQueue(export)
    queue.add(_SOURCE, _span(1))
    queue.flush()
    queue.add(_SOURCE, _span(2))
    queue.close()
    assert exported == [2]


def test_a_queue_takes_no_span_that_is_not_wanted() -> None:
    exported: list[int] = []
    queue = SpanQueue(lambda spans: exported.append(len(spans)), wanted=lambda: False)
    queue.add(_SOURCE, _span(1))
    queue.close()
    assert exported == []


class Exports:
    """Counts the spans of each export."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._came = threading.Event()

    def __call__(self, spans: Sequence[tuple[SpanSource, EndedSpan]]) -> None:
        self.sizes.append(len(spans))
        self._came.set()

    def wait(self, timeout_s: float = 20.0) -> bool:
        """Whether another export has come."""
        found = self._came.wait(timeout_s)
        self._came.clear()
        return found


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SpanQueue, Exports]]:
    """A queue that has exported lately. It waits for so long that a test would fail."""
    monkeypatch.setattr(span_queue, "_DELAY_S", 0.01)
    monkeypatch.setattr(span_queue, "_QUICK_EXPORTS", 2)
    monkeypatch.setattr(span_queue, "_BUSY_DELAY_S", 300.0)
    exports = Exports()
    queue = SpanQueue(exports)
    for number in range(2):
        queue.add(_SOURCE, _span(number))
        assert exports.wait()
    assert exports.sizes == [1, 1]
    yield queue, exports
    queue.close()


def test_a_busy_queue_waits_for_more_spans(busy: tuple[SpanQueue, Exports]) -> None:
    queue, exports = busy
    queue.add(_SOURCE, _span(1))
    assert not exports.wait(0.3)
    assert exports.sizes[2:] == []


def test_a_busy_queue_exports_as_soon_as_a_batch_is_full(busy: tuple[SpanQueue, Exports]) -> None:
    queue, exports = busy
    for number in range(BATCH_SPANS + 1):
        queue.add(_SOURCE, _span(number))
    assert exports.wait()
    assert exports.sizes[2] == BATCH_SPANS


def test_a_busy_queue_that_closes_exports_at_once(busy: tuple[SpanQueue, Exports]) -> None:
    queue, exports = busy
    queue.add(_SOURCE, _span(1))
    queue.close()
    assert exports.sizes[2:] == [1]
