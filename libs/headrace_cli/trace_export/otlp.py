"""A trace as OTLP in JSON, as collectors and tracing backends import it. Pure."""

from __future__ import annotations

from typing import Any, Final

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import ns_from_duration, unix_ns_from_timestamp

_INTERNAL: Final = 1
_ERROR: Final = 2


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
        "kind": _INTERNAL,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + ns_from_duration(span.duration)),
        "attributes": [_attribute(key, value) for key, value in sorted(span.attributes.items())],
    }
    if span.parent_span_id:
        made["parentSpanId"] = span.parent_span_id
    if span.error:
        made["status"] = {"code": _ERROR, "message": span.error}
    return made


def _attribute(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}
