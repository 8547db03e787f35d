"""Bars, shades and a time axis in columns of text. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

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
