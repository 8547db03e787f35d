"""Table and picture of placement.py. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 760, 330, 50, 50, 280
_COLOURS = ("#0b6e99", "#6741d9", "#2b8a3e", "#d9480f")


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
    """The smallest value that this share of all do not exceed."""
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


def draw(rows: Mapping[str, Sequence[Row]]) -> str:
    """Times to first token of all requests as distributions on a logarithmic axis, and the hit rates, as an SVG."""
    times = {way: sorted(max(1e-3, t) for t in all_ttft_s(found)) for way, found in rows.items()}
    low = math.log10(min(found[0] for found in times.values()))
    high = math.log10(max(found[-1] for found in times.values()))
    right = 560

    def x(time_s: float) -> float:
        return _LEFT + (right - _LEFT) * (math.log10(time_s) - low) / max(1e-9, high - low)

    def y(share: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * share

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
            'font-size="11"><rect width="100%" height="100%" fill="white"/>'
        ),
        f'<text x="{_LEFT}" y="20">share of requests with a first token after so long</text>',
        '<text x="590" y="20">prompt tokens not computed</text>',
    ]
    parts += [
        f'<path d="M{_LEFT} {y(share):.1f}H{right}" stroke="#dee2e6"/>'
        f'<text x="{_LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    parts += [
        f'<path d="M{x(time_s):.1f} {_TOP}V{_BOTTOM}" stroke="#dee2e6"/>'
        f'<text x="{x(time_s):.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{time_s * 1e3:g} ms</text>'
        for time_s in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
        if low <= math.log10(time_s) <= high
    ]
    for number, ((way, found), colour) in enumerate(zip(times.items(), _COLOURS, strict=True)):
        points = " ".join(
            f"{x(time_s):.1f},{y((rank + 1) / len(found)):.1f}" for rank, time_s in enumerate(found)
        )
        hit_rate = statistics.median(row.hit_rate for row in rows[way])
        at = 590 + 42 * number
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<rect x="{at}" y="{y(hit_rate):.1f}" width="34" height="{_BOTTOM - y(hit_rate):.1f}" fill="{colour}"/>',
            f'<text x="{at + 17}" y="{y(hit_rate) - 5:.1f}" text-anchor="middle">{hit_rate:.0%}</text>',
            f'<circle cx="{_LEFT + 5 + 110 * number}" cy="34" r="4" fill="{colour}"/>',
            f'<text x="{_LEFT + 13 + 110 * number}" y="38">{way}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
