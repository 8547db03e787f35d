"""Draws a request for a terminal: the sum with its verdict, then the waterfall. Pure.

Every line has at most the given width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from rich.text import Text

from headrace_cli.waterfall.canvas import ASCII, BLOCKS, Charset, Scale, clip, shade_line, spread
from headrace_common.trace_view.model import UNDRAWN_STEPS, Link, PartTime, Step, TraceView
from headrace_common.trace_view.units import (
    format_bytes,
    format_gb_s,
    format_ms,
    format_percent,
)
from headrace_common.trace_view.verdict import verdict

WIDTH_MIN: Final = 60
WIDTH_MAX: Final = 120
LINKS_DRAWN: Final = 8
"""Links with a lane of their own: those that ended last."""
_LABEL_WIDTH: Final = 31
_NUMBER_WIDTH: Final = 11
_PART_WIDTH: Final = 20
_PART_STYLES: Final = {"transfer exposed": "red", "unaccounted": "dim"}
_SERVICE_STYLES: Final = {"router": "cyan", "prefill": "yellow", "decode": "green"}


def clamp_width(width: int) -> int:
    """The width of a drawing on a terminal of `width` columns."""
    return max(WIDTH_MIN, min(WIDTH_MAX, width))


def draw_trace(view: TraceView, *, width: int, ascii_only: bool = False) -> list[Text]:
    """The sum, the waterfall on the scale of the time to first token, and the layers of the last link."""
    width, marks = clamp_width(width), ASCII if ascii_only else BLOCKS
    lines = draw_sum(view, width=width, ascii_only=ascii_only)
    scale = Scale(view.ttft_ns, width - _LABEL_WIDTH - _NUMBER_WIDTH - 2)
    if view.ttft_ns > 0:
        lines.append(Text(""))
        lines.append(Text(f"{'ms':>{_LABEL_WIDTH}} {scale.axis()}", style="dim"))
        for step in view.steps:
            lines += _step_lines(step, scale, width, marks)
        lines += _link_lines(view, scale, width, marks)
        lines += _after_lines(view, width, marks)
    return lines


def draw_sum(view: TraceView, *, width: int, ascii_only: bool = False) -> list[Text]:
    """The request, its verdict, and the parts with their shares."""
    width, marks = clamp_width(width), ASCII if ascii_only else BLOCKS
    lines = [Text(clip(_headline(view), width, marks), style="bold")]
    sentence = textwrap.wrap(verdict(view), width, break_long_words=True) or [""]
    lines += [Text(line, style="red" if view.error else "bold") for line in sentence]
    if not view.parts:
        return lines
    lines.append(Text(""))
    lines += _part_lines(view.parts, view.ttft_ns, width, marks)
    name = "time to first token" if view.answered else "until the end"
    lines.append(_total_line(name, view.ttft_ns, width))
    if view.second_parts:
        second_ns = sum(part.duration_ns for part in view.second_parts)
        lines.append(Text(""))
        lines += _part_lines(view.second_parts, second_ns, width, marks)
        lines.append(_total_line("first to second token", second_ns, width))
    notes = _notes(view)
    lines += [Text(line, style="dim") for line in textwrap.wrap(notes, width)] if notes else []
    return lines


def draw_layers(view: TraceView, *, width: int, ascii_only: bool = False) -> list[Text]:
    """Every write of every link: when its layer was ready, submitted and landed, and what its time went to."""
    width, marks = clamp_width(width), ASCII if ascii_only else BLOCKS
    lines: list[Text] = []
    for link in view.links:
        lines += [Text(""), Text(clip(_link_text(link), width, marks), style="bold")]
        head = f"{'layer':>7}{'ready ms':>11}{'submitted':>11}{'landed':>11}{'bytes':>11}  time went to"
        lines.append(Text(clip(head, width, marks)))
        for write in link.writes:
            cause = f"{write.cause} {format_ms(write.cause_ns)}" if write.cause else ""
            landed = f"{write.landed_ns / 1e6:>11.2f}" if write.finished else f"{'never':>11}"
            text = (
                f"{write.layer:>7}{write.ready_ns / 1e6:>11.2f}{write.submitted_ns / 1e6:>11.2f}{landed}"
                f"{format_bytes(write.payload_bytes):>11}  {cause}"
            )
            lines.append(Text(clip(text.rstrip(), width, marks)))
    return lines


def _headline(view: TraceView) -> str:
    state = "" if view.complete else ", incomplete"
    tokens = f", {view.prompt_tokens:,} prompt tokens" if view.prompt_tokens else ""
    return f"trace {view.trace_id}{state}  {view.request_id}{tokens}"


def _part_lines(parts: Sequence[PartTime], total_ns: int, width: int, marks: Charset) -> list[Text]:
    bar_width = width - _PART_WIDTH - _NUMBER_WIDTH - 10
    lines: list[Text] = []
    for part in parts:
        line = Text(f"  {clip(part.name, _PART_WIDTH, marks):<{_PART_WIDTH}}")
        share = format_percent(part.duration_ns, total_ns)
        line.append(f"{format_ms(part.duration_ns):>{_NUMBER_WIDTH}}{share:>6} ")
        cells = round(bar_width * part.duration_ns / total_ns) if total_ns > 0 else 0
        line.append(marks.full * min(bar_width, cells), style=_PART_STYLES.get(part.name, "blue"))
        line.rstrip()
        lines.append(line)
    return lines


def _total_line(name: str, total_ns: int, width: int) -> Text:
    return Text(f"  {name:<{_PART_WIDTH}}"[: 2 + _PART_WIDTH].ljust(2 + _PART_WIDTH)
        + f"{format_ms(total_ns):>{_NUMBER_WIDTH}}", style="bold")  # fmt: skip


def _notes(view: TraceView) -> str:
    notes: list[str] = []
    if view.hidden_ns:
        notes.append(f"{format_ms(view.hidden_ns)} of the transfer ran beside prefill")
    if view.exposed_in_second:
        notes.append("the transfer delays the second token, not the first")
    if view.clock_error_ns:
        notes.append(f"clocks of the hosts are known within {format_ms(view.clock_error_ns)}")
    return "; ".join(notes)


def _step_lines(step: Step, scale: Scale, width: int, marks: Charset) -> list[Text]:
    starts_later = step.start_ns >= scale.end_ns
    if step.name in UNDRAWN_STEPS or (starts_later and not step.error):
        return []
    label = f"{step.worker or step.service:<10} {'  ' * max(0, step.depth - 1)}{step.label}"
    line = Text(f"{clip(label, _LABEL_WIDTH, marks):<{_LABEL_WIDTH}} ")
    line.append(
        scale.bar(step.start_ns, step.start_ns + step.duration_ns, marks),
        style="red" if step.error else _SERVICE_STYLES.get(step.service, ""),
    )
    line.append(f" {format_ms(step.duration_ns):>{_NUMBER_WIDTH}}")
    lines = [line]
    if step.error:
        lines.append(Text(clip(f"{'':11}! {step.error}", width, marks), style="red"))
    return lines


def _link_lines(view: TraceView, scale: Scale, width: int, marks: Charset) -> list[Text]:
    """A lane for each of the links that ended last: a column is as dark as many bytes were on the way."""
    chosen = sorted(view.links, key=lambda link: link.end_ns)[-LINKS_DRAWN:]
    lanes = [
        spread(((one.submitted_ns, one.landed_ns, one.payload_bytes) for one in link.writes), scale)
        for link in chosen
    ]
    most = max((amount for lane in lanes for amount in lane), default=0.0)
    lines: list[Text] = []
    for link, lane in zip(chosen, lanes, strict=True):
        label = link.name.replace(" -> ", ">")
        line = Text(f"{clip(label, _LABEL_WIDTH, marks):<{_LABEL_WIDTH}} ")
        line.append(shade_line(lane, most, marks), style="red" if link.error else "magenta")
        speed = f"{format_gb_s(link.gb_s)} GB/s" if link.moving_ns > 0 else "-"
        line.append(f" {clip(speed, _NUMBER_WIDTH, marks):>{_NUMBER_WIDTH}}")
        lines.append(line)
    hidden = len(view.links) - len(chosen)
    if hidden:
        text = f"and {hidden} more links that ended earlier, median {format_gb_s(view.median_gb_s)} GB/s"
        lines.append(Text(clip(f"{'':{_LABEL_WIDTH}} {text}", width, marks), style="dim"))
    if view.last_link is not None:
        lines += _strip_lines(view.last_link, width, marks)
    return lines


def _strip_lines(link: Link, width: int, marks: Charset) -> list[Text]:
    """One cell a layer, as dark as long the layer took from ready to landed. Then the bytes of all links."""
    times: dict[int, int] = {}
    for write in link.writes:
        times[write.layer] = max(times.get(write.layer, 0), write.landed_ns - write.ready_ns)
    if not times:
        return []
    layers = sorted(times)
    cells = _folded([times[layer] for layer in layers], width - _LABEL_WIDTH - _NUMBER_WIDTH - 2)
    slowest = max(times, key=lambda layer: times[layer])
    label = f"its layers {layers[0]}-{layers[-1]}, ready to landed"
    line = Text(f"{clip(label, _LABEL_WIDTH, marks):<{_LABEL_WIDTH}} ")
    line.append(shade_line(cells, max(cells), marks), style="magenta")
    text = f"{'':{_LABEL_WIDTH}} slowest: layer {slowest}, {format_ms(times[slowest])}"
    return [line, Text(clip(text, width, marks), style="dim")]


def _folded(values: Sequence[int], width: int) -> list[float]:
    """At most `width` values: the greatest of each group of neighbours. Zero becomes the lightest shade."""
    size = -(-len(values) // max(1, width))
    return [
        max(1.0, float(max(values[start : start + size]))) for start in range(0, len(values), size)
    ]


def _link_text(link: Link) -> str:
    text = f"{link.name}: {format_bytes(link.payload_bytes)}"
    if link.moving_ns > 0:
        text += f" on the way for {format_ms(link.moving_ns)}, {format_gb_s(link.gb_s)} GB/s"
    if link.expected_ns:
        text += f", {format_ms(link.expected_ns)} expected"
    way = ", ".join(part for part in (link.transport, link.strategy) if part)
    return text + (f", by {way}" if way else "")


def _after_lines(view: TraceView, width: int, marks: Charset) -> Iterable[Text]:
    """What the scale leaves out."""
    text = transfer_text(view.links)
    lines = [Text(line) for line in textwrap.wrap(text, width)] if text else []
    if view.answered and view.total_ns > view.ttft_ns:
        later = format_ms(view.total_ns - view.ttft_ns)
        tokens = f", {view.completion_tokens:,} tokens in all" if view.completion_tokens else ""
        lines.append(Text(clip(f"after the first token: {later}{tokens}", width, marks)))
    return lines


def transfer_text(links: Sequence[Link]) -> str:
    """Size and ways of the transfer. Empty without one."""
    if not links:
        return ""
    layers = {write.layer for link in links for write in link.writes}
    writes = sum(len(link.writes) for link in links)
    size = format_bytes(sum(link.payload_bytes for link in links))
    ways = sorted({", ".join(x for x in (link.transport, link.strategy) if x) for link in links})
    by = f" by {'; '.join(way for way in ways if way)}" if any(ways) else ""
    runs, entries = sum(link.runs for link in links), sum(link.entries for link in links)
    counts = f"; {runs:,} runs in {entries:,} entries" if runs else ""
    count = f"{len(links)} link{'s' if len(links) > 1 else ''}"
    return f"{size} of {len(layers)} layers in {writes} writes on {count}{by}{counts}"
