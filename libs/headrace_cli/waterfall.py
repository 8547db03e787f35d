"""Draws a request for a terminal, the sum with its verdict and then the waterfall, and compares two requests. Pure.

Every line has at most the given width.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from headrace_common.telemetry import schema
from headrace_common.trace_view.model import (
    TRANSFER_EXPOSED,
    UNDRAWN_STEPS,
    Link,
    TraceStep,
    TraceView,
)
from headrace_common.trace_view.verdict import (
    format_bytes,
    format_gb_s,
    format_ms,
    format_percent,
    verdict,
)

_TICK_COLUMNS_MIN: Final = 10
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Charset:
    """The characters of a drawing. `shades` begins with the lightest."""

    full: str
    thin: str
    more: str
    ellipsis: str
    shades: str


BLOCKS: Final = Charset("\N{FULL BLOCK}", "\N{LEFT ONE QUARTER BLOCK}", "\N{BLACK RIGHT-POINTING SMALL TRIANGLE}",
    "\N{HORIZONTAL ELLIPSIS}", "\N{LIGHT SHADE}\N{MEDIUM SHADE}\N{DARK SHADE}\N{FULL BLOCK}")  # fmt: skip
ASCII: Final = Charset("#", "|", ">", "~", ".:+#")


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps the times from 0 to `end_ns` to `width` columns."""

    end_ns: int
    width: int

    def column(self, time_ns: int) -> int:
        """The column of a time, which is clipped to the scale."""
        if self.end_ns <= 0:
            return 0
        return max(0, min(self.width - 1, time_ns * self.width // self.end_ns))

    def bar(self, start_ns: int, end_ns: int, marks: Charset) -> str:
        """A bar of exactly `width` columns. What goes on beyond the end has a mark there."""
        if self.width <= 0:
            return ""
        start = self.column(start_ns)
        limit = self.end_ns if self.end_ns > 0 else 1
        end = min(self.width, max(start + 1, math.ceil(end_ns * self.width / limit)))
        short = (end_ns - start_ns) * self.width * 2 < limit
        bar = marks.thin if end - start == 1 and short else marks.full * (end - start)
        if end_ns > self.end_ns > 0:
            bar = bar[:-1] + marks.more
        return (" " * start + bar).ljust(self.width)

    def axis(self) -> str:
        """Marks of whole milliseconds, and the end."""
        end_text = _ms(self.end_ns)
        step_ns = _tick_ns(self.end_ns, self.width)
        line = [" "] * self.width
        last_column = self.width - len(end_text)
        time_ns = 0
        while step_ns > 0 and time_ns < self.end_ns:
            text, column = _ms(time_ns), self.column(time_ns)
            if column + len(text) < last_column:
                line[column : column + len(text)] = text
            time_ns += step_ns
        if last_column >= 0:
            line[last_column:] = end_text
        return "".join(line)


def shade_line(amounts: Sequence[float], most: float, marks: Charset) -> str:
    """One character for each amount, from none for 0 to the darkest for `most`."""
    steps = len(marks.shades)
    return "".join(
        marks.shades[min(steps - 1, int(amount / most * steps))] if amount > 0 and most > 0 else " "
        for amount in amounts
    )


def spread(intervals: Iterable[tuple[int, int, float]], scale: Scale) -> list[float]:
    """Divides amounts among the columns of their (start_ns, end_ns, amount)."""
    columns = [0.0] * max(0, scale.width)
    if not columns:
        return columns
    for start_ns, end_ns, amount in intervals:
        first, last = scale.column(start_ns), scale.column(max(start_ns, end_ns - 1))
        for column in range(first, last + 1):
            columns[column] += amount / (last - first + 1)
    return columns


def clip(text: str, width: int, marks: Charset) -> str:
    """The text in at most `width` columns."""
    return (
        text if len(text) <= width else text[: max(0, width - 1)] + marks.ellipsis[: max(0, width)]
    )


def _tick_ns(end_ns: int, width: int) -> int:
    """The smallest step of 1, 2 or 5 times a power of ten that leaves room for its numbers."""
    if end_ns <= 0 or width < 2 * _TICK_COLUMNS_MIN:
        return 0
    least = end_ns * _TICK_COLUMNS_MIN / width
    power = 10.0 ** math.floor(math.log10(least))
    return max(1, next(round(power * times) for times in (1, 2, 5, 10) if power * times >= least))


def _ms(time_ns: int) -> str:
    value = time_ns / _NS_PER_MS
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2f}"


WIDTH_MIN: Final = 60
WIDTH_MAX: Final = 120
LINKS_DRAWN: Final = 8
"""Links with a lane of their own: those that ended last."""
_LABEL_WIDTH: Final = 31
_NUMBER_WIDTH: Final = 11
_PART_WIDTH: Final = 20
_PART_STYLES: Final = {TRANSFER_EXPOSED: "red", "unaccounted": "dim"}
_OF_ANSWER: Final = frozenset(
    (schema.SPAN_ATTEMPT, schema.SPAN_BACK_OFF, schema.SPAN_GAP, schema.SPAN_MOVE)
)
_SERVICE_STYLES: Final = {"router": "cyan", "prefill": "yellow", "decode": "green", "both": "green"}


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
        lines += _answer_lines(view, width, marks)
    return lines


def draw_sum(view: TraceView, *, width: int, ascii_only: bool = False) -> list[Text]:
    """The request, its verdict, and the parts with their shares."""
    width, marks = clamp_width(width), ASCII if ascii_only else BLOCKS
    lines = [Text(clip(_headline(view), width, marks), style="bold")]
    sentence = textwrap.wrap(verdict(view), width, break_long_words=True) or [""]
    lines += [Text(line, style="red" if view.error else "bold") for line in sentence]
    if not view.parts:
        return lines
    name = "time to first token" if view.answered else "until the end"
    lines += _sum_lines(name, view.parts, width, marks)
    if view.second_parts:
        lines += _sum_lines("first to second token", view.second_parts, width, marks)
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


def _sum_lines(name: str, parts: Mapping[str, int], width: int, marks: Charset) -> list[Text]:
    """An empty line, the parts with their shares, and their sum by this name."""
    bar_width, total_ns = width - _PART_WIDTH - _NUMBER_WIDTH - 10, sum(parts.values())
    lines = [Text("")]
    for part, part_ns in parts.items():
        line = Text(f"  {clip(part, _PART_WIDTH, marks):<{_PART_WIDTH}}")
        share = format_percent(part_ns, total_ns)
        line.append(f"{format_ms(part_ns):>{_NUMBER_WIDTH}}{share:>6} ")
        cells = round(bar_width * part_ns / total_ns) if total_ns > 0 else 0
        line.append(marks.full * min(bar_width, cells), style=_PART_STYLES.get(part, "blue"))
        line.rstrip()
        lines.append(line)
    head = f"  {name:<{_PART_WIDTH}}"[: 2 + _PART_WIDTH]
    lines.append(Text(f"{head}{format_ms(total_ns):>{_NUMBER_WIDTH}}", style="bold"))
    return lines


def _notes(view: TraceView) -> str:
    notes: list[str] = []
    if view.hidden_ns:
        notes.append(f"{format_ms(view.hidden_ns)} of the transfer ran beside prefill")
    if TRANSFER_EXPOSED in view.second_parts:
        notes.append("the transfer delays the second token, not the first")
    if view.clock_error_ns:
        notes.append(f"clocks of the hosts are known within {format_ms(view.clock_error_ns)}")
    if view.other:
        notes.append(f"best other decision: {view.other}")
    return "; ".join(notes)


def _step_lines(step: TraceStep, scale: Scale, width: int, marks: Charset) -> list[Text]:
    if step.name in UNDRAWN_STEPS or step.start_ns >= scale.end_ns:
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


def _answer_lines(view: TraceView, width: int, marks: Charset) -> list[Text]:
    """Attempts and gaps until the end of the answer, on its scale, if there is a gap or a later attempt."""
    if not any(step.name in _OF_ANSWER and step.start_ns >= view.ttft_ns for step in view.steps):
        return []
    scale = Scale(view.total_ns, width - _LABEL_WIDTH - _NUMBER_WIDTH - 2)
    lines = [Text(""), Text(f"{'ms':>{_LABEL_WIDTH}} {scale.axis()}", style="dim")]
    for step in view.steps:
        if step.name in _OF_ANSWER or step.name == schema.SPAN_DECODE:
            lines += _step_lines(step, scale, width, marks)
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
    names = {**first.parts, **second.parts}
    rows = [(name, first.parts.get(name, 0), second.parts.get(name, 0)) for name in names]
    return sorted(rows, key=lambda row: -abs(row[2] - row[1]))


def conclusion(first: TraceView, second: TraceView) -> str:
    """Which request was slower, and by which part most."""
    change_ns = second.ttft_ns - first.ttft_ns
    if change_ns == 0:
        return "both took the same time"
    word = "slower" if change_ns > 0 else "faster"
    along = [
        f"{name} {format_ms(abs(other_ns - one_ns))}"
        for name, one_ns, other_ns in differences(first, second)
        if (other_ns - one_ns) * change_ns > 0
    ]
    return ": ".join((f"B is {format_ms(abs(change_ns))} {word}", *along[:1]))
