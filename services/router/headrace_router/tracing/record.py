"""One stored trace: its spans as bytes, with bounds, and whether it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import duration_from_ns, timestamp_from_unix_ns
from headrace_common.telemetry import schema
from headrace_common.telemetry.otlp import span_to_proto
from headrace_common.telemetry.spans import EndedSpan
from headrace_router.tracing.batches import RawSpan, attributes_as_text
from headrace_router.tracing.worker_clocks import ClockDifference

SPANS_PER_TRACE_MAX: Final = 8_192
NAMES_PER_TRACE_MAX: Final = 64
# What Python's objects of one stored span take beside its bytes: about 400 were measured.
SPAN_OVERHEAD_BYTES: Final = 512
SPAN_ID_BYTES: Final = 8
# The ids, the times and the name of a span.
_FIXED_FIELDS_BYTES: Final = 96
_NUMBER_BYTES: Final = 8
# Of a StoredSpan.
_BYTES: Final = 3
_NAMES_WITH_ATTRIBUTES: Final = frozenset((schema.SPAN_REQUEST, schema.SPAN_ATTEMPT))
NAMES_WITH_FACTS: Final = _NAMES_WITH_ATTRIBUTES | {schema.SPAN_DECODE, schema.SPAN_PREFILL}
"""The spans that decide whether a trace is complete."""

StoredSpan: TypeAlias = tuple[str, str, bytes, int]
"""The service and the worker id of the process that made a span, the span, and the bytes that count for it.

The span is in OTLP's encoding: a message would keep its whole export in memory.
"""


class OwnSpans(NamedTuple):
    """Spans of this router: the fields of EndedSpans, which are encoded only for a reader, and the bytes that count.

    Tuples of these types cost the garbage collector no time.
    """

    service: str
    fields: tuple[tuple[Any, ...], ...]
    size: int

    @classmethod
    def of(cls, service: str, spans: Sequence[EndedSpan]) -> OwnSpans:
        """The spans of one service of this process."""
        content = sum(map(ended_span_bytes, spans))
        size = content + len(spans) * SPAN_OVERHEAD_BYTES
        return cls(service, tuple(map(tuple, spans)), size)

    def read(self) -> list[otlp_pb2.Span]:
        """The spans in OTLP's format."""
        return [span_to_proto(EndedSpan(*one)) for one in self.fields]


class SpanFacts(NamedTuple):
    """What a trace needs to know of a span with a name of NAMES_WITH_FACTS when it is added."""

    span_id: bytes
    name: str
    parent_id: bytes
    failed: bool = False
    request_id: str = ""
    prefill_worker_id: str = ""

    @classmethod
    def of_raw(cls, span: RawSpan) -> SpanFacts:
        """The facts of a worker's span."""
        found = span.parse() if span.name in _NAMES_WITH_ATTRIBUTES else None
        if found is None:
            return cls(span.span_id, span.name, span.parent_id)
        attributes = attributes_as_text(found.attributes)
        return cls(
            *(span.span_id, span.name, span.parent_id, _failed(found)),
            attributes.get(schema.ATTRIBUTE_REQUEST_ID, ""),
            attributes.get(schema.ATTRIBUTE_PREFILL_WORKER_ID, ""),
        )

    @classmethod
    def of_ended(cls, span: EndedSpan) -> SpanFacts:
        """The facts of a span of this router."""
        attributes = span.attributes if span.name in _NAMES_WITH_ATTRIBUTES else {}
        return cls(
            span.span_id.to_bytes(SPAN_ID_BYTES, "big"),
            span.name,
            span.parent_id.to_bytes(SPAN_ID_BYTES, "big"),
            bool(span.error),
            str(attributes.get(schema.ATTRIBUTE_REQUEST_ID, "")),
            str(attributes.get(schema.ATTRIBUTE_PREFILL_WORKER_ID, "")),
        )


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

    def add(self, span: SpanFacts) -> None:
        if span.name == schema.SPAN_REQUEST:
            self._roots.add(span.request_id)
        elif span.name in (schema.SPAN_DECODE, schema.SPAN_PREFILL):
            reported = (span.name, span.parent_id)
            self._reported.add(reported)
            self._missing.discard(reported)
        elif span.name == schema.SPAN_ATTEMPT and not span.failed:
            expected = [schema.SPAN_DECODE]
            if span.prefill_worker_id:
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
        self._own: list[OwnSpans] = []
        self._own_count = 0
        self._completeness = _Completeness()
        self._differences: dict[str, ClockDifference] = {}

    @property
    def differences(self) -> dict[str, ClockDifference]:
        """How far workers' clocks are ahead of this router's, by worker id."""
        return dict(self._differences)

    def add_clocks(self, differences: Mapping[str, ClockDifference]) -> None:
        """Sets how far workers' clocks are ahead."""
        self._differences |= differences

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the last requests of this trace, at most NAMES_PER_TRACE_MAX."""
        return tuple(self._names)

    @property
    def spans(self) -> tuple[StoredSpan | OwnSpans, ...]:
        return (*self._own, *self._spans.values())

    @property
    def span_count(self) -> int:
        return len(self._spans) + self._own_count

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

    def add(
        self, span_id: bytes, facts: SpanFacts | None, stored: StoredSpan, bytes_max: int
    ) -> bool:
        """Adds a span, or replaces the span with its id. False when the trace has no room for it."""
        previous = self._spans.get(span_id)
        trace_bytes = self.stored_bytes + stored[_BYTES]
        if previous is not None:
            trace_bytes -= previous[_BYTES]
        elif self.span_count >= SPANS_PER_TRACE_MAX:
            return False
        if trace_bytes > bytes_max:
            return False
        self._spans[span_id] = stored
        self.stored_bytes = trace_bytes
        # A process may send a span again, unchanged.
        if previous is None and facts is not None:
            self._completeness.add(facts)
        return True

    def add_own(self, spans: OwnSpans, facts: Iterable[SpanFacts], bytes_max: int) -> bool:
        """Adds spans of this router. False when the trace has no room for them."""
        trace_bytes = self.stored_bytes + spans.size
        if self.span_count + len(spans.fields) > SPANS_PER_TRACE_MAX or trace_bytes > bytes_max:
            return False
        self._own.append(spans)
        self._own_count += len(spans.fields)
        self.stored_bytes = trace_bytes
        for one in facts:
            self._completeness.add(one)
        return True

    def summary(self) -> TraceSummary:
        return TraceSummary(
            self.sequence,
            self.trace_id,
            self._request_id,
            self._start_unix_ns,
            self._completeness.complete(self._request_id),
        )


def trace_to_proto(
    summary: TraceSummary,
    spans: tuple[StoredSpan | OwnSpans, ...] = (),
    differences: Mapping[str, ClockDifference] = MappingProxyType({}),
) -> trace_pb2.Trace:
    """Converts a trace, with its spans by start time. Takes long for many spans: call it in a thread.

    Spans of workers in `differences` are moved to this router's clock.
    """
    parsed = [
        _Placed(span, service, worker_id, differences.get(worker_id))
        for stored in spans
        for service, worker_id, span in _read(stored)
    ]
    parsed.sort(key=lambda placed: placed.start_unix_ns)
    return trace_pb2.Trace(
        trace_id=summary.trace_id,
        request_id=summary.request_id,
        start_time=timestamp_from_unix_ns(summary.start_unix_ns),
        complete=summary.complete,
        spans=map(_span_to_proto, parsed),
    )


class _Placed(NamedTuple):
    """A span, and how far the clock of its times is ahead of this router's."""

    span: otlp_pb2.Span
    service: str
    worker_id: str
    difference: ClockDifference | None

    @property
    def start_unix_ns(self) -> int:
        ahead_ns = self.difference.ahead_ns if self.difference is not None else 0
        return max(0, self.span.start_time_unix_nano - ahead_ns)


def _span_to_proto(placed: _Placed) -> trace_pb2.Span:
    span, difference = placed.span, placed.difference
    attributes = attributes_as_text(span.attributes)
    if difference is not None:
        attributes[schema.ATTRIBUTE_CLOCK_AHEAD_MS] = f"{difference.ahead_ns / 1e6:.3f}"
        attributes[schema.ATTRIBUTE_CLOCK_ERROR_MS] = f"{difference.error_ns / 1e6:.3f}"
    # The parent of the root may be a client's span, which is not stored.
    parent = "" if span.name == schema.SPAN_REQUEST else span.parent_span_id.hex()
    return trace_pb2.Span(
        span_id=span.span_id.hex(),
        parent_span_id=parent,
        name=span.name,
        service=placed.service,
        worker_id=placed.worker_id,
        start_time=timestamp_from_unix_ns(placed.start_unix_ns),
        duration=duration_from_ns(span.end_time_unix_nano - span.start_time_unix_nano),
        attributes=attributes,
        linked_span_ids=[link.span_id.hex() for link in span.links],
        error=(span.status.message or "failed") if _failed(span) else "",
    )


def ended_span_bytes(span: EndedSpan) -> int:
    """About as many bytes as the contents of the span take."""
    size = _FIXED_FIELDS_BYTES + _text_bytes(span.error)
    for key, value in span.attributes.items():
        size += len(key) + (_text_bytes(value) if isinstance(value, str) else _NUMBER_BYTES)
    return size


def stored_bytes(span_bytes: int) -> int:
    """The bytes that count for a span."""
    return span_bytes + SPAN_OVERHEAD_BYTES


def _text_bytes(text: str) -> int:
    # One character of other texts may take four bytes.
    return len(text) if text.isascii() else 4 * len(text)


def _read(stored: StoredSpan | OwnSpans) -> Iterator[tuple[str, str, otlp_pb2.Span]]:
    """The spans with their service and worker id, without those of workers that are malformed."""
    if isinstance(stored, OwnSpans):
        for span in stored.read():
            yield stored.service, "", span
        return
    service, worker_id, content, _ = stored
    try:
        yield service, worker_id, otlp_pb2.Span.FromString(content)
    except DecodeError:
        return


def _failed(span: otlp_pb2.Span) -> bool:
    return span.status.code == otlp_pb2.Status.STATUS_CODE_ERROR
