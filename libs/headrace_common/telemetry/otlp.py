"""Ended spans in OTLP's encoding, and as values of OpenTelemetry's SDK."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from headrace_common.telemetry.schema_tables import SPAN_KINDS
from headrace_common.telemetry.spans import EndedSpan, SpanSource

SCOPE: Final = "headrace"
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8
PROTO_KINDS: Final = {
    kind: trace_pb2.Span.SpanKind.Value(f"SPAN_KIND_{kind.name}") for kind in SpanKind
}


def export_request(spans: Iterable[tuple[SpanSource, EndedSpan]]) -> ExportTraceServiceRequest:
    """The spans as one request to a collector, those of one source together."""
    request = ExportTraceServiceRequest()
    scopes: dict[int, trace_pb2.ScopeSpans] = {}
    for source, span in spans:
        scope = scopes.get(id(source))
        if scope is None:
            part = request.resource_spans.add(resource=resource_to_proto(source.resource))
            scope = scopes[id(source)] = part.scope_spans.add()
            scope.scope.name = SCOPE
        # Made in place: to append a message copies it.
        _fill(scope.spans.add(**_fields(span)), span)
    return request


def span_to_proto(span: EndedSpan) -> trace_pb2.Span:
    """One span, without its source."""
    message = trace_pb2.Span(**_fields(span))
    _fill(message, span)
    return message


def _fields(span: EndedSpan) -> dict[str, Any]:
    """The fields of a span that have one value."""
    return {
        "trace_id": span.trace_id.to_bytes(_TRACE_ID_BYTES, "big"),
        "span_id": span.span_id.to_bytes(_SPAN_ID_BYTES, "big"),
        "parent_span_id": span.parent_id.to_bytes(_SPAN_ID_BYTES, "big") if span.parent_id else b"",
        "name": span.name,
        "kind": PROTO_KINDS[SPAN_KINDS.get(span.name, SpanKind.INTERNAL)],
        "start_time_unix_nano": span.start_unix_ns,
        "end_time_unix_nano": span.end_unix_ns,
        "status": trace_pb2.Status(code=trace_pb2.Status.STATUS_CODE_ERROR, message=span.error)
        if span.error
        else None,
    }


def _fill(message: trace_pb2.Span, span: EndedSpan) -> None:
    """Adds the other fields."""
    _add_attributes(message.attributes, span.attributes)
    for name, unix_ns, details in span.events:
        event = message.events.add(name=name, time_unix_nano=unix_ns)
        _add_attributes(event.attributes, details)
    for trace_id, span_id in span.links:
        message.links.add(
            trace_id=trace_id.to_bytes(_TRACE_ID_BYTES, "big"),
            span_id=span_id.to_bytes(_SPAN_ID_BYTES, "big"),
        )


def readable_span(source: SpanSource, span: EndedSpan) -> ReadableSpan:
    """The span for an exporter of the SDK."""
    parent = SpanContext(span.trace_id, span.parent_id, False, _SAMPLED) if span.parent_id else None
    return ReadableSpan(
        span.name,
        context=SpanContext(span.trace_id, span.span_id, False, _SAMPLED),
        parent=parent,
        resource=source.resource,
        attributes=span.attributes,
        events=[Event(name, details, unix_ns) for name, unix_ns, details in span.events],
        links=[
            Link(SpanContext(trace_id, span_id, True, _SAMPLED)) for trace_id, span_id in span.links
        ],
        kind=SPAN_KINDS.get(span.name, SpanKind.INTERNAL),
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
        instrumentation_scope=InstrumentationScope(SCOPE),
    )


def resource_to_proto(resource: Resource) -> resource_pb2.Resource:
    """The attributes of a process or of a worker."""
    message = resource_pb2.Resource()
    _add_attributes(message.attributes, resource.attributes)
    return message


def _add_attributes(target: Any, attributes: Mapping[str, Any]) -> None:
    """Adds the attributes to the repeated field `target`. Messages that are made apart take twice the time."""
    add = target.add
    for key, value in attributes.items():
        add(key=key, value=_value(value))


def _value(value: Any) -> dict[str, Any]:
    """The fields of an AnyValue."""
    if isinstance(value, str):
        return {"string_value": value}
    if isinstance(value, bool):
        return {"bool_value": value}
    if isinstance(value, int):
        return {"int_value": value}
    if isinstance(value, float):
        return {"double_value": value}
    return {"array_value": {"values": [_value(item) for item in value]}}
