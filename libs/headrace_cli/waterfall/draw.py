"""Draws a trace as a waterfall in text. Pure."""

from __future__ import annotations

import math

from rich.text import Text

from headrace.inference.v1 import trace_pb2
from headrace_cli.waterfall.rows import Row, trace_rows
from headrace_cli.waterfall.units import format_ms

WIDTH_MIN = 60
WIDTH_MAX = 120
LABEL_WIDTH = 33
NUMBER_WIDTH = 11
SERVICE_STYLES = {"router": "cyan", "prefill": "yellow", "decode": "green"}


def draw_waterfall(
    trace: trace_pb2.Trace, *, layers: bool, width: int, ascii_only: bool = False
) -> list[Text]:
    """The waterfall as lines of at most `width` columns. A width outside 60 to 120 is clamped."""
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
