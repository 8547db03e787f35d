"""One stored trace: its spans as bytes, with bounds, and whether it is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import duration_from_ns, timestamp_from_unix_ns
from headrace_common.telemetry import schema
from headrace_router.tracing.batches import attributes_as_text

SPANS_PER_TRACE_MAX: Final = 8_192
NAMES_PER_TRACE_MAX: Final = 64
# What Python's objects of one stored span take beside its bytes: about 400 were measured.
SPAN_OVERHEAD_BYTES: Final = 512


StoredSpan: TypeAlias = tuple[str, str, bytes]
"""The service and the worker id of the process that made a span, and the span in OTLP's encoding.

A message would keep its whole export in memory. A tuple of these types costs the garbage collector no time.
"""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace without its spans. A greater `sequence` is newer."""

    sequence: int
    trace_id: str
    request_id: str
    start_unix_ns: int
    complete: bool


class _Completeness:
    """Tracks whether the root span and all spans of the successful attempts' workers have arrived."""

    def __init__(self) -> None:
        # Request ids of root spans. The empty one stands for every request.
        self._roots: set[str] = set()
        self._reported: set[tuple[str, bytes]] = set()
        self._missing: set[tuple[str, bytes]] = set()

    def add(self, span: otlp_pb2.Span) -> None:
        if span.name == schema.SPAN_REQUEST:
            attributes = attributes_as_text(span.attributes)
            self._roots.add(attributes.get(schema.ATTRIBUTE_REQUEST_ID, ""))
        elif span.name in (schema.SPAN_DECODE, schema.SPAN_PREFILL):
            reported = (span.name, span.parent_span_id)
            self._reported.add(reported)
            self._missing.discard(reported)
        elif span.name == schema.SPAN_ATTEMPT and not _failed(span):
            expected = [schema.SPAN_DECODE]
            if attributes_as_text(span.attributes).get(schema.ATTRIBUTE_PREFILL_WORKER_ID):
                expected.append(schema.SPAN_PREFILL)
            keys = {(name, span.span_id) for name in expected}
            self._missing |= keys - self._reported

    def complete(self, request_id: str) -> bool:
        return not self._missing and not self._roots.isdisjoint({"", request_id})


class TraceRecord:
    """The spans of one trace. Requests that share a client's trace share its record. Not thread-safe."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.sequence = 0
        self.stored_bytes = 0
        self._request_id = ""
        self._start_unix_ns = 0
        self._names: dict[str, None] = {}
        self._spans: dict[bytes, StoredSpan] = {}
        self._completeness = _Completeness()

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the last requests of this trace, at most NAMES_PER_TRACE_MAX."""
        return tuple(self._names)

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        return tuple(self._spans.values())

    def start_request(self, sequence: int, request_id: str, start_unix_ns: int) -> str | None:
        """The trace has another request. Returns the id that is no longer among `names`, if any."""
        self.sequence = sequence
        self._request_id = request_id
        self._start_unix_ns = start_unix_ns
        self._names.pop(request_id, None)
        self._names[request_id] = None
        if len(self._names) <= NAMES_PER_TRACE_MAX:
            return None
        oldest = next(iter(self._names))
        del self._names[oldest]
        return oldest

    def add(self, span: otlp_pb2.Span, stored: StoredSpan, bytes_max: int) -> bool:
        """Adds a span, or replaces the span with its id. False when the trace has no room for it."""
        previous = self._spans.get(span.span_id)
        replaced_bytes = _stored_bytes(previous) if previous is not None else 0
        trace_bytes = self.stored_bytes - replaced_bytes + _stored_bytes(stored)
        full = previous is None and len(self._spans) >= SPANS_PER_TRACE_MAX
        if full or trace_bytes > bytes_max:
            return False
        self._spans[span.span_id] = stored
        self.stored_bytes = trace_bytes
        # A process may send a span again, unchanged.
        if previous is None:
            self._completeness.add(span)
        return True

    def summary(self) -> TraceSummary:
        return TraceSummary(
            self.sequence,
            self.trace_id,
            self._request_id,
            self._start_unix_ns,
            self._completeness.complete(self._request_id),
        )


def trace_to_proto(summary: TraceSummary, spans: tuple[StoredSpan, ...] = ()) -> trace_pb2.Trace:
    """Converts a trace, with its spans by start time. Takes long for many spans: call it in a thread."""
    parsed = [
        (otlp_pb2.Span.FromString(data), service, worker_id) for service, worker_id, data in spans
    ]
    parsed.sort(key=lambda part: part[0].start_time_unix_nano)
    return trace_pb2.Trace(
        trace_id=summary.trace_id,
        request_id=summary.request_id,
        start_time=timestamp_from_unix_ns(summary.start_unix_ns),
        complete=summary.complete,
        spans=(_span_to_proto(*part) for part in parsed),
    )


def _span_to_proto(span: otlp_pb2.Span, service: str, worker_id: str) -> trace_pb2.Span:
    # The parent of the root may be a client's span, which is not stored.
    parent = "" if span.name == schema.SPAN_REQUEST else span.parent_span_id.hex()
    return trace_pb2.Span(
        span_id=span.span_id.hex(),
        parent_span_id=parent,
        name=span.name,
        service=service,
        worker_id=worker_id,
        start_time=timestamp_from_unix_ns(span.start_time_unix_nano),
        duration=duration_from_ns(span.end_time_unix_nano - span.start_time_unix_nano),
        attributes=attributes_as_text(span.attributes),
        error=(span.status.message or "failed") if _failed(span) else "",
    )


def _stored_bytes(stored: StoredSpan) -> int:
    service, worker_id, data = stored
    return len(service) + len(worker_id) + len(data) + SPAN_OVERHEAD_BYTES


def _failed(span: otlp_pb2.Span) -> bool:
    return span.status.code == otlp_pb2.Status.STATUS_CODE_ERROR
