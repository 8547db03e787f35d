"""Compares two requests part by part. Pure."""

from __future__ import annotations

from rich.text import Text

from headrace_cli.waterfall.canvas import ASCII, BLOCKS, clip
from headrace_cli.waterfall.draw import clamp_width
from headrace_common.trace_view.model import PartTime, TraceView
from headrace_common.trace_view.units import format_ms
from headrace_common.trace_view.verdict import verdict


def draw_comparison(
    first: TraceView, second: TraceView, *, width: int, ascii_only: bool = False
) -> list[Text]:
    """The verdict of both, and the difference of each part, the greatest first."""
    width, marks = clamp_width(width), ASCII if ascii_only else BLOCKS
    rows = [*differences(first, second), ("sum", first.ttft_ns, second.ttft_ns)]
    lines = [
        Text(clip(f"{mark}  {view.request_id}: {verdict(view)}", width, marks))
        for mark, view in (("A", first), ("B", second))
    ]
    lines.append(Text(clip(conclusion(first, second), width, marks), style="bold"))
    lines.append(Text(f"  {'':<18}{'A':>13}{'B':>13}{'B - A':>13}", style="dim"))
    for name, one_ns, other_ns in rows:
        change = f"{'+' if other_ns >= one_ns else '-'}{format_ms(abs(other_ns - one_ns))}"
        text = f"  {clip(name, 18, marks):<18}{format_ms(one_ns):>13}{format_ms(other_ns):>13}{change:>13}"
        lines.append(Text(clip(text, width, marks), style="bold" if name == "sum" else ""))
    return lines


def differences(first: TraceView, second: TraceView) -> list[tuple[str, int, int]]:
    """Each part with its nanoseconds in both requests, by the size of the difference."""
    names = list(dict.fromkeys(part.name for part in (*first.parts, *second.parts)))
    rows = [(name, first.part_ns(name), second.part_ns(name)) for name in names]
    return sorted(rows, key=lambda row: -abs(row[2] - row[1]))


def conclusion(first: TraceView, second: TraceView) -> str:
    """Which request was slower, and by which part most."""
    change_ns = second.ttft_ns - first.ttft_ns
    if change_ns == 0:
        return "both took the same time"
    word = "slower" if change_ns > 0 else "faster"
    along = [
        PartTime(name, other_ns - one_ns)
        for name, one_ns, other_ns in differences(first, second)
        if (other_ns - one_ns) * change_ns > 0
    ]
    text = f"B is {format_ms(abs(change_ns))} {word}"
    return text + (f": {along[0].name} {format_ms(abs(along[0].duration_ns))}" if along else "")
