"""Draws a trace as a waterfall in text. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from headrace.inference.v1 import trace_pb2
from headrace_common.telemetry import schema

WIDTH_MIN = 60
WIDTH_MAX = 120
LABEL_WIDTH = 33
NUMBER_WIDTH = 11
SERVICE_STYLES = {"router": "cyan", "prefill": "yellow", "decode": "green"}
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
    """One line: where its bar begins and how long it is, in nanoseconds from the trace's start."""

    depth: int
    service: str
    label: str
    start_ns: int
    duration_ns: int
    error: str = ""


def trace_rows(trace: trace_pb2.Trace, *, layers: bool) -> list[Row]:
    """The trace's spans as a tree of rows. Without `layers`, a task's transfers share one row."""
    known = {span.span_id for span in trace.spans}
    children: dict[str, list[trace_pb2.Span]] = defaultdict(list)
    for span in trace.spans:
        parent = span.parent_span_id if span.parent_span_id in known else ""
        children[parent].append(span)
    origin_ns = min((span.start_time.ToNanoseconds() for span in trace.spans), default=0)
    rows: list[Row] = []

    def visit(span: trace_pb2.Span, depth: int) -> None:
        rows.append(_row(span, depth, origin_ns))
        below = sorted(children[span.span_id], key=_order)
        sent = [child for child in below if child.name == schema.SPAN_TRANSFER_LAYER]
        if sent and not layers:
            rows.append(_summary_row(sent, depth + 1, origin_ns))
        for child in below:
            if layers or child.name != schema.SPAN_TRANSFER_LAYER:
                visit(child, depth + 1)

    for root in sorted(children[""], key=_order):
        visit(root, 0)
    return rows


def draw_waterfall(
    trace: trace_pb2.Trace, *, layers: bool, width: int, ascii_only: bool = False
) -> list[Text]:
    """The waterfall as lines of at most `width` columns (60 at least, 120 at most)."""
    width = max(WIDTH_MIN, min(WIDTH_MAX, width))
    rows = trace_rows(trace, layers=layers)
    total_ns = max((row.start_ns + row.duration_ns for row in rows), default=0)
    bar_width = width - LABEL_WIDTH - NUMBER_WIDTH - 2
    lines = [_headline(trace, total_ns, width)]
    for row in rows:
        label = _clip(f"{row.service:<7} {'  ' * row.depth}{row.label}", LABEL_WIDTH, ascii_only)
        line = Text(f"{label:<{LABEL_WIDTH}} ")
        line.append(
            _bar(row, total_ns, bar_width, ascii_only),
            style="red" if row.error else SERVICE_STYLES.get(row.service, ""),
        )
        line.append(f" {format_ms(row.duration_ns):>{NUMBER_WIDTH}}")
        lines.append(line)
        if row.error:
            lines.append(Text(_clip(f"{'':8}! {row.error}", width, ascii_only), style="red"))
    return lines


def layer_spans(trace: trace_pb2.Trace) -> list[trace_pb2.Span]:
    """The writes of single layers, in order of their start."""
    return [span for span in trace.spans if span.name == schema.SPAN_TRANSFER_LAYER]


def format_ms(duration_ns: int) -> str:
    """Nanoseconds as milliseconds, with as many digits as tell something."""
    milliseconds = duration_ns / 1e6
    return f"{milliseconds:.2f} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"


def format_bytes(count: int) -> str:
    """Bytes in binary units, at most 9 characters."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _order(span: trace_pb2.Span) -> tuple[int, int, int]:
    attributes = span.attributes
    return (
        span.start_time.ToNanoseconds(),
        int(attributes.get(schema.ATTRIBUTE_LAYER, "0")),
        -span.duration.ToNanoseconds(),
    )


def _row(span: trace_pb2.Span, depth: int, origin_ns: int) -> Row:
    return Row(
        depth=depth,
        service=span.service.removeprefix("headrace-"),
        label=_label(span),
        start_ns=span.start_time.ToNanoseconds() - origin_ns,
        duration_ns=span.duration.ToNanoseconds(),
        error=span.error,
    )


def _label(span: trace_pb2.Span) -> str:
    label = LABELS.get(span.name, span.name.removeprefix("headrace."))
    attributes = span.attributes
    if span.name == schema.SPAN_TRANSFER_LAYER:
        ranks = ""
        source = attributes.get(schema.ATTRIBUTE_SOURCE_RANK, "0")
        destination = attributes.get(schema.ATTRIBUTE_DESTINATION_RANK, "0")
        if (source, destination) != ("0", "0"):
            ranks = f" {source}>{destination}"
        size = format_bytes(int(attributes.get(schema.ATTRIBUTE_PAYLOAD_BYTES, "0")))
        return f"layer {attributes.get(schema.ATTRIBUTE_LAYER, '?')}{ranks} {size}"
    if span.name == schema.SPAN_ATTEMPT:
        return f"attempt {attributes.get(schema.ATTRIBUTE_ATTEMPT, '')}".rstrip()
    if span.name in (schema.SPAN_PREFILL, schema.SPAN_DECODE) and span.worker_id:
        return f"{label} on {span.worker_id}" if span.worker_id != label else label
    return label


def _summary_row(sent: Sequence[trace_pb2.Span], depth: int, origin_ns: int) -> Row:
    start_ns = min(span.start_time.ToNanoseconds() for span in sent)
    end_ns = max(span.start_time.ToNanoseconds() + span.duration.ToNanoseconds() for span in sent)
    layer_count = len({span.attributes.get(schema.ATTRIBUTE_LAYER, "") for span in sent})
    size = sum(int(span.attributes.get(schema.ATTRIBUTE_PAYLOAD_BYTES, "0")) for span in sent)
    return Row(
        depth=depth,
        service=sent[0].service.removeprefix("headrace-"),
        label=f"{layer_count} layers {format_bytes(size)}",
        start_ns=start_ns - origin_ns,
        duration_ns=end_ns - start_ns,
    )


def _bar(row: Row, total_ns: int, width: int, ascii_only: bool) -> str:
    full = "#" if ascii_only else "\N{FULL BLOCK}"
    thin = "|" if ascii_only else "\N{LEFT ONE QUARTER BLOCK}"
    if total_ns <= 0:
        return " " * width
    start = min(width - 1, int(row.start_ns * width / total_ns))
    end = min(width, math.ceil((row.start_ns + row.duration_ns) * width / total_ns))
    cells = end - start
    short = row.duration_ns * width < total_ns / 2
    mark = thin if cells <= 1 and short else full * max(1, cells)
    return f"{' ' * start}{mark}"[:width].ljust(width)


def _headline(trace: trace_pb2.Trace, total_ns: int, width: int) -> Text:
    state = "" if trace.complete else ", incomplete"
    text = f"trace {trace.trace_id}  {len(trace.spans)} spans, {format_ms(total_ns)}{state}"
    return Text(_clip(text, width, True), style="bold")


def _clip(text: str, width: int, ascii_only: bool) -> str:
    if len(text) <= width:
        return text
    return text[: width - 1] + ("~" if ascii_only else "\N{HORIZONTAL ELLIPSIS}")
