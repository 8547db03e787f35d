"""Ended spans in OTLP's encoding, and as values of OpenTelemetry's SDK."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from headrace_common.telemetry.schema_tables import SPAN_KINDS
from headrace_common.telemetry.spans import EndedSpan, SpanSource

_SCOPE: Final = "headrace"
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8
_PROTO_KINDS: Final = {
    kind: trace_pb2.Span.SpanKind.Value(f"SPAN_KIND_{kind.name}") for kind in SpanKind
}


def export_request(spans: Iterable[tuple[SpanSource, EndedSpan]]) -> ExportTraceServiceRequest:
    """The spans as one request to a collector, those of one source together."""
    request = ExportTraceServiceRequest()
    scopes: dict[int, trace_pb2.ScopeSpans] = {}
    for source, span in spans:
        scope = scopes.get(id(source))
        if scope is None:
            part = request.resource_spans.add(resource=_resource(source.resource))
            scope = scopes[id(source)] = part.scope_spans.add()
            scope.scope.name = _SCOPE
        scope.spans.append(span_to_proto(span))
    return request


def span_to_proto(span: EndedSpan) -> trace_pb2.Span:
    """One span, without its source."""
    return trace_pb2.Span(
        trace_id=span.trace_id.to_bytes(_TRACE_ID_BYTES, "big"),
        span_id=span.span_id.to_bytes(_SPAN_ID_BYTES, "big"),
        parent_span_id=span.parent_id.to_bytes(_SPAN_ID_BYTES, "big") if span.parent_id else b"",
        name=span.name,
        kind=_PROTO_KINDS[SPAN_KINDS.get(span.name, SpanKind.INTERNAL)],
        start_time_unix_nano=span.start_unix_ns,
        end_time_unix_nano=span.end_unix_ns,
        attributes=_attributes(span.attributes),
        events=[
            trace_pb2.Span.Event(name=name, time_unix_nano=unix_ns, attributes=_attributes(details))
            for name, unix_ns, details in span.events
        ],
        links=[
            trace_pb2.Span.Link(
                trace_id=trace_id.to_bytes(_TRACE_ID_BYTES, "big"),
                span_id=span_id.to_bytes(_SPAN_ID_BYTES, "big"),
            )
            for trace_id, span_id in span.links
        ],
        status=trace_pb2.Status(code=trace_pb2.Status.STATUS_CODE_ERROR, message=span.error)
        if span.error
        else None,
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
        instrumentation_scope=InstrumentationScope(_SCOPE),
    )


def _resource(resource: Resource) -> resource_pb2.Resource:
    return resource_pb2.Resource(attributes=_attributes(resource.attributes))


def _attributes(attributes: Mapping[str, Any]) -> list[common_pb2.KeyValue]:
    return [common_pb2.KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: Any) -> common_pb2.AnyValue:
    if isinstance(value, str):
        return common_pb2.AnyValue(string_value=value)
    if isinstance(value, bool):
        return common_pb2.AnyValue(bool_value=value)
    if isinstance(value, int):
        return common_pb2.AnyValue(int_value=value)
    if isinstance(value, float):
        return common_pb2.AnyValue(double_value=value)
    return common_pb2.AnyValue(
        array_value=common_pb2.ArrayValue(values=[_value(item) for item in value])
    )
