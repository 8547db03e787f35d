"""One stored trace: its spans as bytes, with bounds, and whether it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2
from opentelemetry.sdk.trace import ReadableSpan

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import duration_from_ns, timestamp_from_unix_ns
from headrace_common.latency.clocks import ClockDifference
from headrace_common.telemetry import schema
from headrace_router.tracing.request_record import AttemptFacts, MadeSpan, RoutedRecord

BATCH_SPANS: Final = 256
ATTRIBUTES_MAX: Final = 128
_SERVICE_PREFIX: Final = "headrace-"
_NAME_CHARACTERS_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """At most BATCH_SPANS spans of one process, or none. `worker_id` is empty for a router."""

    service: str
    worker_id: str
    spans: Sequence[otlp_pb2.Span]


def span_batches(export: ExportTraceServiceRequest) -> Iterator[SpanBatch]:
    """The spans of an export, in their order. A part without spans is a batch too, so that it takes no longer."""
    for part in export.resource_spans:
        service, worker_id = _names_of(part.resource)
        for scope in part.scope_spans or (otlp_pb2.ScopeSpans(),):
            for start in range(0, len(scope.spans) or 1, BATCH_SPANS):
                yield SpanBatch(service, worker_id, scope.spans[start : start + BATCH_SPANS])


def _names_of(resource: resource_pb2.Resource) -> tuple[str, str]:
    """The service and the worker id of a process."""
    attributes = attributes_as_text(resource.attributes)
    service = attributes.get("service.name", "")[:_NAME_CHARACTERS_MAX]
    service = service.removeprefix(_SERVICE_PREFIX)
    instance = attributes.get("service.instance.id", "")[:_NAME_CHARACTERS_MAX]
    return service, "" if service == "router" else instance


def attributes_as_text(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, str]:
    """The first ATTRIBUTES_MAX attributes."""
    return {pair.key: _text(pair.value) for pair in islice(pairs, ATTRIBUTES_MAX)}


def _text(value: common_pb2.AnyValue) -> str:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return ", ".join(_text(item) for item in islice(value.array_value.values, ATTRIBUTES_MAX))
    if kind == "bool_value":
        return "true" if value.bool_value else "false"
    content: Any = getattr(value, kind) if kind else ""
    return f"{content:g}" if kind == "double_value" else str(content)


SPANS_PER_TRACE_MAX: Final = 8_192
NAMES_PER_TRACE_MAX: Final = 64
# What Python's objects of one stored span take beside its bytes: about 400 were measured.
SPAN_OVERHEAD_BYTES: Final = 512
SPAN_ID_BYTES: Final = 8
# Of a StoredSpan.
_BYTES: Final = 3

_ROUTER: Final = "router"
_WORKER_SPANS: Final = {schema.SPAN_DECODE: "decode", schema.SPAN_PREFILL: "prefill"}

StoredSpan: TypeAlias = tuple[str, str, bytes, int]
"""The service and the worker id of the process that made a span, the span, and the bytes that count for it.

The span is in OTLP's encoding: a message would keep its whole export in memory.
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
    """Tracks whether the requests have ended and all spans of the successful attempts' workers have arrived."""

    def __init__(self) -> None:
        # Request ids of root spans. The empty one stands for every request.
        self._roots: set[str] = set()
        self.reported: set[tuple[str, bytes]] = set()
        """The names and the parents of the workers' spans that have arrived."""
        self._missing: set[tuple[str, bytes]] = set()

    def add(self, span: otlp_pb2.Span) -> None:
        if span.name == schema.SPAN_REQUEST:
            # Decode workers with clients of their own have root spans.
            attributes = attributes_as_text(span.attributes)
            self._roots.add(attributes.get(schema.ATTRIBUTE_REQUEST_ID, ""))
            return
        if span.name not in _WORKER_SPANS:
            return
        reported = (span.name, span.parent_span_id)
        self.reported.add(reported)
        self._missing.discard(reported)

    def add_request(self, request: RoutedRecord) -> None:
        self._roots.add(request.request_id)
        for facts in request.attempts if request.sampled else ():
            if facts.context is not None and not facts.error:
                expected = {(schema.SPAN_DECODE, attempt_id(facts))}
                if facts.prefill_worker_id:
                    expected.add((schema.SPAN_PREFILL, attempt_id(facts)))
                self._missing |= expected - self.reported

    def complete(self, request_id: str) -> bool:
        return not self._missing and not self._roots.isdisjoint({"", request_id})


class TraceContents(NamedTuple):
    """The requests that have ended, and the spans that were sent. `reported`: see _Completeness."""

    requests: tuple[RoutedRecord, ...]
    reported: frozenset[tuple[str, bytes]]
    sent: tuple[StoredSpan, ...]
    differences: Mapping[str, ClockDifference]

    def placed(self) -> Iterator[_Placed]:
        """All spans, in no order."""
        for made in self._made():
            yield _Placed(_encoded(made.span), made.service, made.worker_id, None)
        for service, worker_id, content, _ in self.sent:
            span = otlp_pb2.Span.FromString(content)
            yield _Placed(span, service, worker_id, self.differences.get(worker_id))

    def _made(self) -> Iterator[MadeSpan]:
        for request in self.requests:
            for span in request.spans():
                yield MadeSpan(_ROUTER, "", span)
            for number, facts in enumerate(request.attempts):
                for name, service in _WORKER_SPANS.items():
                    if facts.context and (name, attempt_id(facts)) not in self.reported:
                        yield from request.worker_spans(number, service)


class TraceRecord:
    """The requests and spans of one trace. Requests that share a client's trace share its record. Not thread-safe."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.sequence = 0
        self.stored_bytes = 0
        self._request_id = ""
        self._start_unix_ns = 0
        self._names: dict[str, None] = {}
        self._spans: dict[bytes, StoredSpan] = {}
        self._requests: list[RoutedRecord] = []
        self._completeness = _Completeness()
        self._differences: dict[str, ClockDifference] = {}

    def add_clocks(self, differences: Mapping[str, ClockDifference]) -> None:
        """Sets how far workers' clocks are ahead."""
        self._differences |= differences

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the last requests of this trace, at most NAMES_PER_TRACE_MAX."""
        return tuple(self._names)

    @property
    def contents(self) -> TraceContents:
        """What a reader gets."""
        return TraceContents(
            tuple(self._requests),
            frozenset(self._completeness.reported),
            tuple(self._spans.values()),
            dict(self._differences),
        )

    @property
    def span_count(self) -> int:
        """The number of spans that were sent."""
        return len(self._spans)

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
        trace_bytes = self.stored_bytes + stored[_BYTES]
        if previous is not None:
            trace_bytes -= previous[_BYTES]
        elif self.span_count >= SPANS_PER_TRACE_MAX:
            return False
        if trace_bytes > bytes_max:
            return False
        self._spans[span.span_id] = stored
        self.stored_bytes = trace_bytes
        # A process may send a span again, unchanged.
        if previous is None:
            self._completeness.add(span)
        return True

    def add_request(self, request: RoutedRecord, bytes_max: int) -> bool:
        """Adds a request that has ended. False when the trace has no room for it."""
        trace_bytes = self.stored_bytes + request.stored_bytes
        if trace_bytes > bytes_max:
            return False
        self._requests.append(request)
        self.stored_bytes = trace_bytes
        self._completeness.add_request(request)
        self._differences |= request.differences
        return True

    def summary(self) -> TraceSummary:
        return TraceSummary(
            self.sequence,
            self.trace_id,
            self._request_id,
            self._start_unix_ns,
            self._completeness.complete(self._request_id),
        )


def trace_to_proto(summary: TraceSummary, contents: TraceContents | None = None) -> trace_pb2.Trace:
    """Converts a trace, with its spans by start time. Takes long for many spans: call it in a thread.

    Spans of workers with a known clock are moved to this router's clock. A router makes those of a worker that has sent
    none for an attempt from what the worker has reported.
    """
    parsed = [*contents.placed()] if contents is not None else []
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


def stored_bytes(span_bytes: int) -> int:
    """The bytes that count for a span."""
    return span_bytes + SPAN_OVERHEAD_BYTES


def attempt_id(facts: AttemptFacts) -> bytes:
    """The id of an attempt's span, which is the parent of its workers' spans."""
    return facts.context.span_id.to_bytes(SPAN_ID_BYTES, "big") if facts.context else b""


def _encoded(span: ReadableSpan) -> otlp_pb2.Span:
    (resource,) = encode_spans([span]).resource_spans
    return resource.scope_spans[0].spans[0]


def _failed(span: otlp_pb2.Span) -> bool:
    return span.status.code == otlp_pb2.Status.STATUS_CODE_ERROR
