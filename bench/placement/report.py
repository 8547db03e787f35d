"""Table of placement.py. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
