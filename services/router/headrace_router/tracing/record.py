"""One stored trace: its spans as bytes, with bounds, and whether it is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from headrace_common.durations import (
    duration_from_ns,
    timestamp_from_unix_ns,
    unix_ns_from_timestamp,
)
from headrace_common.latency.clocks import ClockDifference
from headrace_common.telemetry import schema
from headrace_frontend.running.record import RequestRecord
from headrace_router.tracing.attempt_record import RoutedAttempt

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
WorkerSpan: TypeAlias = tuple[str, bytes]
"""The name and the parent of a worker's span that stands for an attempt."""


class _SentSpans:
    """The spans that were sent for one trace, by id, and what they show of its requests."""

    def __init__(self) -> None:
        self.spans: dict[bytes, StoredSpan] = {}
        self.workers = Counter[WorkerSpan]()
        # Decode workers with clients of their own have root spans. The empty request id stands for every request.
        self.roots: set[str] = set()

    def add(self, span: otlp_pb2.Span, stored: StoredSpan) -> None:
        is_new = span.span_id not in self.spans
        self.spans[span.span_id] = stored
        if span.name == schema.SPAN_REQUEST:
            attributes = attributes_as_text(span.attributes)
            self.roots.add(attributes.get(schema.ATTRIBUTE_REQUEST_ID, ""))
        elif span.name in _WORKER_SPANS:
            self.workers[span.name, span.parent_span_id] += is_new


class TraceContents(NamedTuple):
    """The requests that have ended, and the spans that were sent, of which `workers` are workers' own."""

    requests: tuple[RequestRecord, ...]
    sent: tuple[StoredSpan, ...]
    workers: frozenset[WorkerSpan]

    def spans(self) -> list[trace_pb2.Span]:
        """All spans, by start time. Takes long for many spans: call it in a thread.

        Spans of workers with a known clock are moved to this router's clock. Those of a worker that has sent none for
        an attempt are made from what the worker has reported.
        """
        differences: dict[str, ClockDifference] = {}
        for request in self.requests:
            differences |= request.differences
        found = [_span_to_proto(_encoded(span), *process) for process, span in self._made()]
        for service, worker_id, content, _ in self.sent:
            span = otlp_pb2.Span.FromString(content)
            found.append(_span_to_proto(span, service, worker_id, differences.get(worker_id)))
        return sorted(found, key=lambda span: unix_ns_from_timestamp(span.start_time))

    def _made(self) -> Iterator[tuple[tuple[str, str], ReadableSpan]]:
        """Spans with the service and the worker id of the process that did the work that they show."""
        for request in self.requests:
            for span in request.spans():
                yield (_ROUTER, ""), span
            for attempt in routed_attempts(request):
                for name, service in _WORKER_SPANS.items():
                    if (name, _span_id(attempt)) not in self.workers:
                        process = (service, attempt.worker_id(service))
                        for span in attempt.worker_spans(request, service):
                            yield process, span


class TraceRecord:
    """The requests and spans of one trace. Requests that share a client's trace share its record. Not thread-safe."""

    __slots__ = ("_sent", "_start_unix_ns", "names", "requests", "sequence", "stored_bytes")

    def __init__(self) -> None:
        self.sequence = 0
        """A greater one is newer."""
        self.stored_bytes = 0
        self.names: tuple[str, ...] = ()
        """The ids of the last requests of this trace, the newest last, at most NAMES_PER_TRACE_MAX."""
        self._start_unix_ns = 0
        self.requests: tuple[RequestRecord, ...] = ()
        """Those that have ended, the newest last."""
        self._sent: _SentSpans | None = None

    @property
    def span_count(self) -> int:
        """The number of spans that were sent."""
        return len(self._sent.spans) if self._sent is not None else 0

    @property
    def complete(self) -> bool:
        """Whether the newest request has ended, and all spans of the successful attempts' workers have arrived."""
        ended = {request.request_id for request in self.requests}
        sent = self._sent or _SentSpans()
        awaited = {
            (name, _span_id(attempt)): _span_count(attempt, name)
            for request in self.requests
            for attempt in (routed_attempts(request) if request.sampled else ())
            for name in _WORKER_SPANS
            if not attempt.error and (name == schema.SPAN_DECODE or attempt.prefill_worker_id)
        }
        known = ended | sent.roots
        return Counter(awaited) <= sent.workers and not {"", *self.names[-1:]}.isdisjoint(known)

    def start_request(self, sequence: int, request_id: str, start_unix_ns: int) -> None:
        """The trace has another request."""
        self.sequence, self._start_unix_ns = sequence, start_unix_ns
        if not self.names:
            self.names = (request_id,)
            return
        others = [name for name in self.names if name != request_id]
        self.names = (*others[1 - NAMES_PER_TRACE_MAX :], request_id)

    def add(self, span: otlp_pb2.Span, stored: StoredSpan, bytes_max: int) -> int | None:
        """Adds a span, or replaces the span with its id. The bytes that it adds, None when the trace has no room."""
        sent = self._sent = self._sent or _SentSpans()
        previous = sent.spans.get(span.span_id)
        size = stored[_BYTES]
        if previous is not None:
            size -= previous[_BYTES]
        elif self.span_count >= SPANS_PER_TRACE_MAX:
            return None
        if self.stored_bytes + size > bytes_max:
            return None
        sent.add(span, stored)
        self.stored_bytes += size
        return size

    def add_request(self, request: RequestRecord, bytes_max: int) -> int | None:
        """Adds a request that has ended. The bytes that it adds, None when the trace has no room."""
        size = request.stored_bytes
        if self.stored_bytes + size > bytes_max:
            return None
        self.requests += (request,)
        self.stored_bytes += size
        return size

    def contents(self) -> TraceContents:
        """What a reader gets."""
        sent = self._sent or _SentSpans()
        return TraceContents(self.requests, tuple(sent.spans.values()), frozenset(sent.workers))

    def summary(self, trace_id: str) -> trace_pb2.Trace:
        """The trace without its spans."""
        return trace_pb2.Trace(
            trace_id=trace_id,
            request_id="".join(self.names[-1:]),
            start_time=timestamp_from_unix_ns(self._start_unix_ns),
            complete=self.complete,
        )


def routed_attempts(request: RequestRecord) -> list[RoutedAttempt]:
    """Those that have a span."""
    return [one for one in request.attempts if isinstance(one, RoutedAttempt) and one.context]


def _span_id(attempt: RoutedAttempt) -> bytes:
    """The id of an attempt's span, which is the parent of its workers' spans."""
    return attempt.context.span_id.to_bytes(SPAN_ID_BYTES, "big") if attempt.context else b""


def _span_count(attempt: RoutedAttempt, name: str) -> int:
    """How many spans of this name the workers of an attempt send: one for each task, but for those that they refuse."""
    parts = attempt.parts if name == schema.SPAN_PREFILL else ()
    return 1 + sum(part.done.HasField("times") for part in parts)


def _encoded(span: ReadableSpan) -> otlp_pb2.Span:
    (resource,) = encode_spans([span]).resource_spans
    return resource.scope_spans[0].spans[0]


def _span_to_proto(
    span: otlp_pb2.Span, service: str, worker_id: str, difference: ClockDifference | None = None
) -> trace_pb2.Span:
    """`difference`: how far the clock of its times is ahead of this router's."""
    attributes, start_unix_ns = attributes_as_text(span.attributes), span.start_time_unix_nano
    if difference is not None:
        start_unix_ns = max(0, start_unix_ns - difference.ahead_ns)
        attributes[schema.ATTRIBUTE_CLOCK_AHEAD_MS] = f"{difference.ahead_ns / 1e6:.3f}"
        attributes[schema.ATTRIBUTE_CLOCK_ERROR_MS] = f"{difference.error_ns / 1e6:.3f}"
    failed = span.status.code == otlp_pb2.Status.STATUS_CODE_ERROR
    return trace_pb2.Span(
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        name=span.name,
        service=service,
        worker_id=worker_id,
        start_time=timestamp_from_unix_ns(start_unix_ns),
        duration=duration_from_ns(span.end_time_unix_nano - span.start_time_unix_nano),
        attributes=attributes,
        linked_span_ids=[link.span_id.hex() for link in span.links],
        error=(span.status.message or "failed") if failed else "",
    )


def stored_bytes(span_bytes: int) -> int:
    """The bytes that count for a span."""
    return span_bytes + SPAN_OVERHEAD_BYTES
