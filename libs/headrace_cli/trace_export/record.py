"""A trace as the record that `headrace trace --json` prints. Pure."""

from __future__ import annotations

from headrace.inference.v1 import trace_pb2
from headrace_cli.records import LinkRecord, PartRecord, SpanRecord, TraceRecord
from headrace_common.durations import ns_from_duration, unix_ns_from_timestamp
from headrace_common.trace_view.reading import read_trace
from headrace_common.trace_view.verdict import verdict


def trace_record(trace: trace_pb2.Trace) -> TraceRecord:
    """A trace for programs."""
    view = read_trace(trace)
    return TraceRecord(
        trace_id=trace.trace_id,
        request_id=trace.request_id,
        start_unix_ns=unix_ns_from_timestamp(trace.start_time),
        complete=trace.complete,
        verdict=verdict(view),
        ttft_ns=view.ttft_ns if view.answered else None,
        parts=[PartRecord(part.name, part.duration_ns) for part in view.parts],
        links=[
            LinkRecord(
                link.name,
                link.transport,
                link.payload_bytes,
                link.moving_ns,
                link.end_ns,
                len(link.writes),
            )
            for link in view.links
        ],
        spans=[
            SpanRecord(
                span_id=span.span_id,
                parent_span_id=span.parent_span_id or None,
                name=span.name,
                service=span.service,
                worker=span.worker_id or None,
                start_unix_ns=unix_ns_from_timestamp(span.start_time),
                duration_ns=ns_from_duration(span.duration),
                attributes=dict(span.attributes),
            )
            for span in trace.spans
        ],
    )
