"""A trace as OTLP in JSON, for collectors and tracing backends. Pure."""

from __future__ import annotations

import math
from typing import Any, Final

from opentelemetry.trace import SpanKind

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import ns_from_duration, unix_ns_from_timestamp
from headrace_common.telemetry.schema_tables import ATTRIBUTE_TYPES, SPAN_KINDS

_ERROR: Final = 2
_SEPARATOR: Final = ", "


def otlp_object(trace: trace_pb2.Trace) -> dict[str, Any]:
    """An ExportTraceServiceRequest. Ids are hex and 64-bit numbers are texts, as OTLP's JSON has them."""
    by_process: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for span in trace.spans:
        by_process.setdefault((span.service, span.worker_id), []).append(_span(trace, span))
    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [
                        _attribute("service.name", f"headrace-{service}"),
                        *([_attribute("service.instance.id", worker)] if worker else []),
                    ]
                },
                "scopeSpans": [{"scope": {"name": "headrace"}, "spans": spans}],
            }
            for (service, worker), spans in by_process.items()
        ]
    }


def _span(trace: trace_pb2.Trace, span: trace_pb2.Span) -> dict[str, Any]:
    start_ns = unix_ns_from_timestamp(span.start_time)
    made: dict[str, Any] = {
        "traceId": trace.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        # OTLP's numbers begin with "unspecified".
        "kind": SPAN_KINDS.get(span.name, SpanKind.INTERNAL).value + 1,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + ns_from_duration(span.duration)),
        "attributes": [_attribute(key, value) for key, value in sorted(span.attributes.items())],
    }
    if span.parent_span_id:
        made["parentSpanId"] = span.parent_span_id
    if span.linked_span_ids:
        made["links"] = [
            {"traceId": trace.trace_id, "spanId": linked} for linked in span.linked_span_ids
        ]
    if span.error:
        made["status"] = {"code": _ERROR, "message": span.error}
    return made


def _attribute(key: str, text: str) -> dict[str, Any]:
    return {"key": key, "value": _value(ATTRIBUTE_TYPES.get(key, "string"), text)}


def _value(kind: str, text: str) -> dict[str, Any]:
    """An attribute's value from its text in a trace. A text that does not fit the type stays one."""
    if kind.endswith("[]"):
        item = kind.removesuffix("[]")
        parts = text.split(_SEPARATOR) if text else []
        return {"arrayValue": {"values": [_value(item, part) for part in parts]}}
    try:
        match kind:
            case "int":
                return {"intValue": str(int(text))}
            case "double" if math.isfinite(float(text)):
                return {"doubleValue": float(text)}
    except ValueError:
        return {"stringValue": text}
    if kind == "bool" and text in ("true", "false"):
        return {"boolValue": text == "true"}
    return {"stringValue": text}
