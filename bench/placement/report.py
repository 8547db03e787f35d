"""Table and picture of placement.py. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 1000, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 456, 74, 306
# One hue for the weights of one way. A darker shade is a larger weight.
_COLOURS = ("#91c9f7", "#4da3e8", "#1b6fc2", "#0b3d82", "#2b8a3e", "#d9480f")


@dataclass(frozen=True, slots=True)
class Row:
    """One way in one round. Rates and shares from 0 to 1."""

    hit_rate: float
    decode_hit_rate: float
    remote_share: float
    ttft_s: tuple[float, ...]
    balance: float
    took_s: float


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def all_ttft_s(rows: Sequence[Row]) -> list[float]:
    """Times to first token of all rounds."""
    return [ttft_s for row in rows for ttft_s in row.ttft_s]


def render(rows: Mapping[str, Sequence[Row]], what: str) -> str:
    """Markdown: medians of the rounds, and percentiles over all requests."""
    head = [
        "placement",
        "hits",
        "hits on decode",
        "prefilled remotely",
        "TTFT p50, ms",
        "TTFT p99, ms",
        "balance",
    ]
    lines = [f"Placement of {what}", ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for way, found in rows.items():
        times_s = all_ttft_s(found)
        hits = [row.hit_rate for row in found]
        cells = [
            way,
            f"{statistics.median(hits):.1%} ({min(hits):.1%} to {max(hits):.1%})",
            f"{statistics.median(row.decode_hit_rate for row in found):.1%}",
            f"{statistics.median(row.remote_share for row in found):.1%}",
            f"{percentile(times_s, 0.5) * 1e3:.0f}",
            f"{percentile(times_s, 0.99) * 1e3:.0f}",
            f"{statistics.median(row.balance for row in found):.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def draw(rows: Mapping[str, Sequence[Row]], title: str) -> str:
    """Distributions of the times to first token, and bars with the numbers of each way, as an SVG."""
    colours = dict(zip(rows, _COLOURS, strict=False))
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
                'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
            ),
            f'<text x="16" y="24" font-size="15" font-weight="bold">Placement: {title}</text>',
            *_distributions(rows, colours),
            *_bars(rows, colours),
            "</svg>",
            "",
        ]
    )


def _distributions(rows: Mapping[str, Sequence[Row]], colours: Mapping[str, str]) -> Iterator[str]:
    times = {way: sorted(max(1e-3, t) for t in all_ttft_s(found)) for way, found in rows.items()}
    # The first percent at either end would compress the rest.
    low = math.log10(min(percentile(found, 0.01) for found in times.values()))
    high = math.log10(max(percentile(found, 0.995) for found in times.values()))

    def x(time_s: float) -> float:
        share = (math.log10(time_s) - low) / max(1e-9, high - low)
        return _LEFT + (_RIGHT - _LEFT) * min(1.0, max(0.0, share))

    def y(share: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * share

    yield f'<text x="{_LEFT}" y="{_TOP - 12}">share of requests that have their first token</text>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield (
            f'<path d="M{_LEFT} {y(share):.1f}H{_RIGHT}" stroke="#dee2e6"/>'
            f'<text x="{_LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        )
    for time_s in (
        scale * step for scale in (1e-3, 1e-2, 0.1, 1.0, 10.0) for step in (1.0, 2.0, 5.0)
    ):
        if low <= math.log10(time_s) <= high:
            yield (
                f'<path d="M{x(time_s):.1f} {_TOP}V{_BOTTOM}" stroke="#dee2e6"/>'
                f'<text x="{x(time_s):.1f}" y="{_BOTTOM + 17}" text-anchor="middle">{time_s * 1e3:g}</text>'
            )
    yield (
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 36}" text-anchor="middle">'
        "ms after the request, logarithmic</text>"
    )
    for way, found in times.items():
        points = " ".join(
            f"{x(time_s):.1f},{y((rank + 1) / len(found)):.1f}" for rank, time_s in enumerate(found)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{colours[way]}" stroke-width="2"/>'


def _bars(rows: Mapping[str, Sequence[Row]], colours: Mapping[str, str]) -> Iterator[str]:
    """A line for each way, which is also the legend."""
    columns: tuple[tuple[str, Callable[[Sequence[Row]], float], str], ...] = (
        ("hits", lambda found: statistics.median(row.hit_rate for row in found), "{:.0%}"),
        ("TTFT p50, ms", lambda found: 1e3 * percentile(all_ttft_s(found), 0.5), "{:.0f}"),
        ("TTFT p99, ms", lambda found: 1e3 * percentile(all_ttft_s(found), 0.99), "{:.0f}"),
        ("balance", lambda found: statistics.median(row.balance for row in found), "{:.2f}"),
    )
    step = (_BOTTOM - _TOP) / max(1, len(rows))
    for number, way in enumerate(rows):
        middle = _TOP + (number + 0.5) * step
        yield (
            f'<rect x="{_RIGHT + 40}" y="{middle - 6:.1f}" width="12" height="12" fill="{colours[way]}"/>'
            f'<text x="{_RIGHT + 60}" y="{middle + 4:.1f}">{way}</text>'
        )
    for place, (title, number_of, form) in enumerate(columns):
        left = _RIGHT + 160 + 92 * place
        yield f'<text x="{left}" y="{_TOP - 12}">{title}</text>'
        numbers = {way: number_of(found) for way, found in rows.items()}
        for number, (way, value) in enumerate(numbers.items()):
            top = _TOP + number * step + 4
            width = 42 * value / max(numbers.values())
            yield (
                f'<rect x="{left}" y="{top:.1f}" width="{width:.1f}" height="{step - 8:.1f}" '
                f'fill="{colours[way]}"/>'
                f'<text x="{left + width + 5:.1f}" y="{top + step / 2:.1f}">{form.format(value)}</text>'
            )
