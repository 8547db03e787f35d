"""The rows of a waterfall: the spans of a trace as a tree. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.inference.v1 import trace_pb2
from headrace_cli.waterfall.units import format_bytes
from headrace_common.durations import ns_from_duration, unix_ns_from_timestamp
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import LayerStamps, unpack_writes

LABELS = {
    schema.SPAN_REQUEST: "request",
    schema.SPAN_TOKENIZE: "tokenize",
    schema.SPAN_ROUTE: "route",
    schema.SPAN_ATTEMPT: "attempt",
    schema.SPAN_RESERVE: "reserve",
    schema.SPAN_QUEUE: "queue",
    schema.SPAN_FIRST_TOKEN: "first token",
    schema.SPAN_SECOND_TOKEN: "second token",
    schema.SPAN_STREAM: "stream",
    schema.SPAN_PREFILL: "prefill",
    schema.SPAN_PREFILL_COMPUTE: "compute",
    schema.SPAN_TRANSFER_LINK: "link",
    schema.SPAN_TRANSFER_LAYER: "layer",
    schema.SPAN_DECODE: "decode",
    schema.SPAN_DECODE_RESERVE: "reserve blocks",
    schema.SPAN_DECODE_KV_WAIT: "kv wait",
    schema.SPAN_DECODE_TOKEN_WAIT: "token wait",
    schema.SPAN_DECODE_LOGITS_WAIT: "logits wait",
    schema.SPAN_DECODE_SAMPLE: "sample",
    schema.SPAN_DECODE_FIRST_TOKEN: "first token",
    schema.SPAN_DECODE_GENERATE: "generate",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the waterfall. Times count from the trace's start."""

    depth: int
    service: str
    label: str
    start_ns: int
    duration_ns: int
    error: str = ""


def trace_rows(trace: trace_pb2.Trace, *, layers: bool) -> list[Row]:
    """The rows of a trace, depth first. Without `layers`, one row stands for a task's links."""
    known = {span.span_id for span in trace.spans}
    children: dict[str, list[trace_pb2.Span]] = defaultdict(list)
    for span in trace.spans:
        parent = span.parent_span_id if span.parent_span_id in known else ""
        children[parent].append(span)
    origin_ns = min((unix_ns_from_timestamp(span.start_time) for span in trace.spans), default=0)
    rows: list[Row] = []

    def visit(span: trace_pb2.Span, depth: int) -> None:
        rows.append(_row(span, depth, origin_ns))
        below = sorted(children[span.span_id], key=_order)
        sent = [child for child in below if child.name == schema.SPAN_TRANSFER_LINK]
        if sent and not layers:
            rows.append(_summary_row(sent, depth + 1, origin_ns))
        for child in below:
            if child.name == schema.SPAN_TRANSFER_LINK:
                rows.extend(_link_rows(child, depth + 1, origin_ns) if layers else ())
            else:
                visit(child, depth + 1)

    for root in sorted(children[""], key=_order):
        visit(root, 0)
    return rows


def link_spans(trace: trace_pb2.Trace) -> list[trace_pb2.Span]:
    """The spans of the transfer's links, in the order of the trace."""
    return [span for span in trace.spans if span.name == schema.SPAN_TRANSFER_LINK]


def layers_of(span: trace_pb2.Span) -> tuple[LayerStamps, ...]:
    """The layer writes of a link."""
    return unpack_writes(span.attributes.get(schema.ATTRIBUTE_LINK_LAYERS, ""))


def _link_rows(span: trace_pb2.Span, depth: int, origin_ns: int) -> list[Row]:
    """A link's row, and one below it for each layer."""
    start_ns = unix_ns_from_timestamp(span.start_time) - origin_ns
    service = span.service.removeprefix("headrace-")
    writes = [
        Row(
            depth=depth + 1,
            service=service,
            label=f"layer {write.layer} {format_bytes(write.payload_bytes)}",
            start_ns=start_ns + write.submitted_ns,
            duration_ns=write.landed_ns - write.submitted_ns,
        )
        for write in layers_of(span)
    ]
    return [_row(span, depth, origin_ns), *writes]


def _order(span: trace_pb2.Span) -> tuple[int, int, int]:
    attributes = span.attributes
    return (
        unix_ns_from_timestamp(span.start_time),
        int(attributes.get(schema.ATTRIBUTE_LAYER, "0")),
        -ns_from_duration(span.duration),
    )


def _row(span: trace_pb2.Span, depth: int, origin_ns: int) -> Row:
    return Row(
        depth=depth,
        service=span.service.removeprefix("headrace-"),
        label=_label(span),
        start_ns=unix_ns_from_timestamp(span.start_time) - origin_ns,
        duration_ns=ns_from_duration(span.duration),
        error=span.error,
    )


def _label(span: trace_pb2.Span) -> str:
    label = LABELS.get(span.name, span.name.removeprefix("headrace."))
    attributes = span.attributes
    if span.name == schema.SPAN_TRANSFER_LINK:
        source = attributes.get(schema.ATTRIBUTE_SOURCE_RANK, "0")
        destination = attributes.get(schema.ATTRIBUTE_DESTINATION_RANK, "0")
        size = format_bytes(int(attributes.get(schema.ATTRIBUTE_PAYLOAD_BYTES, "0")))
        return f"link {source}>{destination} {size}"
    if span.name == schema.SPAN_ATTEMPT:
        return f"attempt {attributes.get(schema.ATTRIBUTE_ATTEMPT, '')}".rstrip()
    if span.name in (schema.SPAN_PREFILL, schema.SPAN_DECODE) and span.worker_id:
        return f"{label} on {span.worker_id}" if span.worker_id != label else label
    return label


def _summary_row(sent: Sequence[trace_pb2.Span], depth: int, origin_ns: int) -> Row:
    start_ns = min(unix_ns_from_timestamp(span.start_time) for span in sent)
    end_ns = max(
        unix_ns_from_timestamp(span.start_time) + ns_from_duration(span.duration) for span in sent
    )
    layer_count = len({write.layer for span in sent for write in layers_of(span)})
    size = sum(int(span.attributes.get(schema.ATTRIBUTE_PAYLOAD_BYTES, "0")) for span in sent)
    return Row(
        depth=depth,
        service=sent[0].service.removeprefix("headrace-"),
        label=f"{layer_count} layers {format_bytes(size)}",
        start_ns=start_ns - origin_ns,
        duration_ns=end_ns - start_ns,
    )
