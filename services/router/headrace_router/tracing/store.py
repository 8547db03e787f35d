"""Stores the traces of the last requests that this router served."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import (
    duration_from_ns,
    timestamp_from_unix_ns,
    unix_ns_from_timestamp,
)
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.limits import PAGE_SIZE_MAX
from headrace_common.telemetry import schema

SPANS_PER_TRACE_MAX = 8_192
PAGE_SIZE_DEFAULT = 20
_SERVICE_PREFIX = "headrace-"


@dataclass(slots=True)
class _Record:
    sequence: int
    trace_id: str
    request_id: str
    start_unix_ns: int
    spans: dict[str, trace_pb2.Span] = field(default_factory=dict)

    def add_span(self, span: trace_pb2.Span) -> None:
        """Drops a new span beyond SPANS_PER_TRACE_MAX."""
        if len(self.spans) < SPANS_PER_TRACE_MAX:
            self.spans[span.span_id] = span

    def complete(self) -> bool:
        """Whether the root span and all spans of the successful attempt's workers have arrived."""
        spans = self.spans.values()
        if not any(_is_root_of(span, self.request_id) for span in spans):
            return False
        reported = {(span.name, span.parent_span_id) for span in spans}
        for span in spans:
            if span.name != schema.SPAN_ATTEMPT or span.error:
                continue
            expected = [schema.SPAN_DECODE]
            if span.attributes.get(schema.ATTRIBUTE_PREFILL_WORKER_ID):
                expected.append(schema.SPAN_PREFILL)
            if not all((name, span.span_id) in reported for name in expected):
                return False
        return True

    def to_proto(self, *, with_spans: bool) -> trace_pb2.Trace:
        spans = sorted(
            self.spans.values(), key=lambda span: unix_ns_from_timestamp(span.start_time)
        )
        return trace_pb2.Trace(
            trace_id=self.trace_id,
            request_id=self.request_id,
            start_time=timestamp_from_unix_ns(self.start_unix_ns),
            complete=self.complete(),
            spans=spans if with_spans else (),
        )


class TraceStore:
    """Stores the traces of the last `trace_count` requests. Thread-safe, as exporters have threads of their own."""

    def __init__(self, trace_count: int) -> None:
        self._trace_count = trace_count
        self._lock = threading.Lock()
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._trace_of_request: dict[str, str] = {}
        self._sequence = 0

    def start_trace(self, trace_id: str, request_id: str, start_unix_ns: int) -> None:
        """Starts to store the spans of a request's trace.

        Requests that share a client's trace share one record, with the id of the newest request.
        """
        with self._lock:
            self._sequence += 1
            record = self._records.pop(trace_id, None)
            spans = record.spans if record else {}
            self._records[trace_id] = _Record(
                self._sequence, trace_id, request_id, start_unix_ns, spans
            )
            self._trace_of_request[request_id] = trace_id
            while len(self._records) > self._trace_count:
                oldest, _ = self._records.popitem(last=False)
                self._forget_requests(oldest)

    def _forget_requests(self, trace_id: str) -> None:
        names = [name for name, owner in self._trace_of_request.items() if owner == trace_id]
        for name in names:
            del self._trace_of_request[name]

    def add_spans(self, resource_spans: Iterable[otlp_pb2.ResourceSpans]) -> None:
        """Adds spans in OTLP's format. Drops spans of unknown traces."""
        with self._lock:
            for resource in resource_spans:
                attributes = _attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        record = self._records.get(span.trace_id.hex())
                        if record is not None:
                            record.add_span(_convert(span, attributes))

    def get(self, name: str) -> trace_pb2.Trace:
        """The trace with this trace id or request id. The newest for an empty name. Raises NotFound."""
        with self._lock:
            trace_id = name or next(reversed(self._records), "")
            record = self._records.get(trace_id) or self._records.get(
                self._trace_of_request.get(name, "")
            )
            if record is None:
                raise NotFound(
                    f"no trace {name!r} is stored; only the last {self._trace_count} are"
                    if name
                    else "no trace is stored yet",
                    metadata={"id": name},
                )
            return record.to_proto(with_spans=True)

    def list_page(self, page_size: int, page_token: str) -> tuple[Sequence[trace_pb2.Trace], str]:
        """One page of traces without spans, newest first, and the next page's token. Raises InvalidRequest."""
        if page_size > PAGE_SIZE_MAX:
            raise InvalidRequest({"page_size": f"must be at most {PAGE_SIZE_MAX}, not {page_size}"})
        if page_token and not (page_token.isascii() and page_token.isdecimal()):
            raise InvalidRequest({"page_token": "must be a next_page_token, unchanged"})
        size = page_size or PAGE_SIZE_DEFAULT
        with self._lock:
            older = [
                record
                for record in reversed(self._records.values())
                if not page_token or record.sequence < int(page_token)
            ]
            chosen = older[:size]
            token = str(chosen[-1].sequence) if len(older) > size else ""
            return [record.to_proto(with_spans=False) for record in chosen], token


class StoreExporter(SpanExporter):
    """Adds the router's own spans to its store."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Always succeeds."""
        self._store.add_spans(encode_spans(spans).resource_spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to flush: `export` adds spans at once."""


def _convert(span: otlp_pb2.Span, resource: Mapping[str, str]) -> trace_pb2.Span:
    failed = span.status.code == otlp_pb2.Status.STATUS_CODE_ERROR
    service = resource.get("service.name", "").removeprefix(_SERVICE_PREFIX)
    # The parent of the root may be a client's span, which is not stored.
    parent = "" if span.name == schema.SPAN_REQUEST else span.parent_span_id.hex()
    return trace_pb2.Span(
        span_id=span.span_id.hex(),
        parent_span_id=parent,
        name=span.name,
        service=service,
        worker_id="" if service == "router" else resource.get("service.instance.id", ""),
        start_time=timestamp_from_unix_ns(span.start_time_unix_nano),
        duration=duration_from_ns(span.end_time_unix_nano - span.start_time_unix_nano),
        attributes=_attributes(span.attributes),
        error=(span.status.message or "failed") if failed else "",
    )


def _is_root_of(span: trace_pb2.Span, request_id: str) -> bool:
    return (
        span.name == schema.SPAN_REQUEST
        and span.attributes.get(schema.ATTRIBUTE_REQUEST_ID, request_id) == request_id
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, str]:
    return {pair.key: _text(pair.value) for pair in pairs}


def _text(value: common_pb2.AnyValue) -> str:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return ", ".join(_text(item) for item in value.array_value.values)
    if kind == "bool_value":
        return "true" if value.bool_value else "false"
    content: Any = getattr(value, kind) if kind else ""
    return f"{content:g}" if kind == "double_value" else str(content)
