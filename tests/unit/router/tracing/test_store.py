"""The trace store: which spans and traces it stores, and when a trace is complete."""

from __future__ import annotations

from collections import Counter

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.latency.clocks import ClockDifference
from headrace_common.telemetry import schema
from headrace_router.tracing import record
from headrace_router.tracing import store as trace_store
from headrace_router.tracing.store import TraceLimits, TraceStore
from tests.unit.router.tracing.records import attempt, ended

_TRACE = "ab" * 16
_ROOT, _ATTEMPT = "01" * 8, "02" * 8


def _span(
    name: str,
    span_id: str,
    parent: str = "",
    *,
    service: str = "router",
    trace_id: str = _TRACE,
    error: str = "",
    **attributes: str,
) -> ResourceSpans:
    keys = {"worker": schema.ATTRIBUTE_PREFILL_WORKER_ID, "request": schema.ATTRIBUTE_REQUEST_ID}
    span = Span(
        trace_id=bytes.fromhex(trace_id),
        span_id=bytes.fromhex(span_id),
        parent_span_id=bytes.fromhex(parent),
        name=name,
        start_time_unix_nano=1_000,
        end_time_unix_nano=3_000,
        attributes=[
            KeyValue(key=keys[key], value=AnyValue(string_value=value))
            for key, value in attributes.items()
        ],
    )
    if error:
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=error))
    resource = Resource(
        attributes=[
            KeyValue(key="service.name", value=AnyValue(string_value=f"headrace-{service}")),
            KeyValue(key="service.instance.id", value=AnyValue(string_value=f"{service}-0")),
        ]
    )
    return ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=[span])])


def _add(store: TraceStore, *parts: ResourceSpans) -> None:
    export = ExportTraceServiceRequest(resource_spans=parts)
    for batch in record.span_batches(export):
        store.add_batch(batch)


class _Store(TraceStore):
    """Counts what it drops."""

    def __init__(self, traces: int = 10, **bounds: int) -> None:
        self.dropped: Counter[str] = Counter()
        super().__init__(
            TraceLimits(traces, **bounds), lambda count, why: self.dropped.update({why: count})
        )


def _store(**bounds: int) -> _Store:
    """With one trace."""
    store = _Store(**bounds)
    store.start_trace(_TRACE, "r1", 500)
    return store


def test_kept_traces_are_removed_after_others_up_to_half_of_all() -> None:
    store = _Store(6)

    def start(number: int) -> str:
        trace_id = f"{number:032x}"
        store.start_trace(trace_id, f"r{number}", number)
        return trace_id

    def stored() -> set[int]:
        return {int(trace.request_id[1:]) for trace in store.list_page(100, "")[0]}

    for number in range(1, 7):
        store.keep(start(number)) if number <= 2 else start(number)
    for number in range(7, 20):
        start(number)
    assert stored() == {1, 2, 16, 17, 18, 19}
    # Of more than three, the oldest one counts like any other.
    for number in (16, 17):
        store.keep(f"{number:032x}")
    start(20)
    assert stored() == {2, 16, 17, 18, 19, 20}
    store.keep("ab" * 16)
    for number in range(21, 30):
        start(number)
    assert stored() == {2, 16, 17, 27, 28, 29}
    # A trace that is kept may have another request.
    start(2)
    start(30)
    assert 2 in stored()


def test_spans_of_unknown_traces_are_dropped() -> None:
    store = _store()
    _add(store, _span(schema.SPAN_DECODE, "03" * 8, trace_id="cd" * 16))
    with pytest.raises(NotFound, match="no trace"):
        store.get("cd" * 16)
    assert not store.get("").spans


def test_old_traces_are_dropped_and_the_newest_is_the_default() -> None:
    store = _Store(2)
    with pytest.raises(NotFound, match="yet"):
        store.get("")
    for number in range(3):
        store.start_trace(f"{number:032x}", f"r{number}", number)
    assert store.get("").request_id == "r2"
    for name in ("r1", "cmpl-r1", "chatcmpl-r1", "resp_r1", "msg_r1"):
        assert store.get(name).trace_id == f"{1:032x}"
    with pytest.raises(NotFound):
        store.get("r0")


def test_spans_per_trace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "SPANS_PER_TRACE_MAX", 3)
    store = _store()
    for number in range(9):
        _add(store, _span(schema.SPAN_TRANSFER_LINK, f"{number + 1:016x}"))
    assert len(store.get("").spans) == 3


def _filled(trace_id: str, count: int, size: int = 1_000) -> list[ResourceSpans]:
    """Spans of about `size` bytes."""
    parts = [
        _span(schema.SPAN_TRANSFER_LINK, f"{number + 1:016x}", trace_id=trace_id)
        for number in range(count)
    ]
    for part in parts:
        part.scope_spans[0].spans[0].status.message = "x" * size
    return parts


def test_bytes_per_trace_are_bounded() -> None:
    store = _store(trace_bytes=10_000)
    _add(store, *_filled(_TRACE, 20))
    kept = len(store.get("r1").spans)
    assert 5 <= kept <= 9
    assert store.stored_bytes <= 10_000
    assert store.dropped == {trace_store.DROPPED_TRACE: 20 - kept}
    # A span that is sent again takes no more room.
    _add(store, *_filled(_TRACE, kept))
    assert len(store.get("r1").spans) == kept
    assert store.dropped.total() == 20 - kept


def test_bytes_of_all_traces_are_bounded_and_the_oldest_are_removed() -> None:
    store = _Store(100, trace_bytes=20_000, total_bytes=50_000)
    for number in range(20):
        store.start_trace(f"{number:032x}", f"r{number}", number)
        _add(store, *_filled(f"{number:032x}", 10))
        assert store.stored_bytes <= 50_000
    assert len(store.get("r19").spans) == 10
    with pytest.raises(NotFound):
        store.get("r0")
    traces, _ = store.list_page(100, "")
    assert set(store.dropped) == {trace_store.DROPPED_STORE}
    assert store.dropped.total() == 10 * (20 - len(traces))


def test_a_span_that_is_too_large_or_has_no_valid_id_is_dropped() -> None:
    store = _store()
    _add(store, *_filled(_TRACE, 1, trace_store.SPAN_BYTES_MAX))
    _add(store, _span(schema.SPAN_TRANSFER_LINK, "01" * 9))
    assert not store.get("r1").spans
    assert store.dropped == {trace_store.DROPPED_SPAN: 2}


def test_a_request_with_too_large_a_record_is_dropped() -> None:
    store = _Store(trace_bytes=10_000)
    store.start_trace(ended().trace_id, "r1", 500)
    store.end_request(ended(error="x" * 10_000))
    assert store.dropped == {trace_store.DROPPED_TRACE: 1}
    assert not store.stored_bytes
    store.end_request(ended())
    assert store.stored_bytes > 0
    assert store.get("r1").complete


def test_names_of_requests_that_share_a_trace_are_bounded() -> None:
    store = _store()
    for number in range(10_000):
        store.start_trace(_TRACE, f"shared{number}", number)
    assert store.get("shared9999").request_id == "shared9999"
    assert store.get(f"shared{10_000 - record.NAMES_PER_TRACE_MAX}").trace_id == _TRACE
    with pytest.raises(NotFound):
        store.get("shared0")
    # The removal of a trace removes its names, but not a name that another trace has taken over.
    store.start_trace("cd" * 16, "shared9999", 1)
    for number in range(9):
        store.start_trace(f"{number + 1:032x}", f"r{number}", 1)
    assert store.get("shared9999").trace_id == "cd" * 16
    with pytest.raises(NotFound):
        store.get("shared9998")


def test_spans_are_sorted_by_start_time() -> None:
    store = _store()
    for number, start_ns in enumerate((300, 100, 200)):
        part = _span(schema.SPAN_TRANSFER_LINK, f"{number + 1:016x}")
        part.scope_spans[0].spans[0].start_time_unix_nano = start_ns
        _add(store, part)
    starts = [span.start_time.ToNanoseconds() for span in store.get("").spans]
    assert starts == [100, 200, 300]


def test_pages_are_ordered_newest_first() -> None:
    store = _Store()
    for number in range(5):
        store.start_trace(f"{number:032x}", f"r{number}", number)
    first, token = store.list_page(2, "")
    second, token_2 = store.list_page(2, token)
    third, end = store.list_page(2, token_2)
    names = [trace.request_id for trace in (*first, *second, *third)]
    assert names == ["r4", "r3", "r2", "r1", "r0"]
    assert end == ""
    for size, wrong in ((1_001, ""), (1, "x")):
        with pytest.raises(InvalidRequest):
            store.list_page(size, wrong)


def test_attribute_values_become_text() -> None:
    values = {
        "true": AnyValue(bool_value=True),
        "7": AnyValue(int_value=7),
        "0.5": AnyValue(double_value=0.5),
        "a, b": AnyValue(
            array_value=ArrayValue(values=[AnyValue(string_value="a"), AnyValue(string_value="b")])
        ),
        "": AnyValue(),
    }
    for text, value in values.items():
        assert record._text(value) == text


def test_workers_spans_are_moved_to_the_routers_clock() -> None:
    store = _Store(4)
    store.start_trace(_TRACE, "r", 1)
    _add(store, _span(schema.SPAN_REQUEST, _ROOT, request="r"))
    _add(store, _span(schema.SPAN_DECODE, "03" * 8, _ROOT, service="decode"))
    one = attempt(remote=False)
    # From the monotonic clock, which is 100 ns behind.
    one.differences["decode-0"] = ClockDifference(-1_999_999_900, 40_000)
    store.end_request(ended(one, trace_id=int(_TRACE, 16), request_id="r"))
    (root,) = (span for span in store.get("r").spans if span.span_id == _ROOT)
    (moved,) = (span for span in store.get("r").spans if span.span_id == "03" * 8)
    assert root.start_time.ToNanoseconds() == 1_000
    assert moved.start_time.ToNanoseconds() == 2_000_001_000
    assert moved.duration.ToNanoseconds() == 2_000
    assert moved.attributes[schema.ATTRIBUTE_CLOCK_AHEAD_MS] == "-2000.000"
    assert moved.attributes[schema.ATTRIBUTE_CLOCK_ERROR_MS] == "0.040"
    assert schema.ATTRIBUTE_CLOCK_AHEAD_MS not in root.attributes
