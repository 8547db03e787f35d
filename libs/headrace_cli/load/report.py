"""Shows a run as a table, as JSON, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich import box
from rich.table import Table

from headrace_cli.load.sample import RequestSample
from headrace_cli.load.summary import OBJECTIVES, PERCENTILES, Summary, values

LABELS: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_WIDTH, _HEIGHT, _MARGIN = 640, 150, 46


def times_table(summary: Summary) -> Table:
    """A row for each kind of time, in milliseconds."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("ms", no_wrap=True)
    for name in ("mean", *(f"p{percent}" for percent in PERCENTILES), "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in OBJECTIVES:
        found = summary.times[name]
        numbers = (found.mean_ms, *found.percentiles.values(), found.max_ms)
        table.add_row(LABELS[name], *(f"{number:,.1f}" for number in numbers))
    return table


def lines(summary: Summary) -> list[str]:
    """Counts and rates."""
    failures = ", ".join(f"{count} {name}" for name, count in sorted(summary.failures.items()))
    found = [
        (
            f"{summary.completed} complete in {summary.duration_s:.1f} s, "
            f"{sum(summary.failures.values())} failed{f' ({failures})' if failures else ''}"
        ),
        (
            f"{summary.request_rate:.2f} requests/s, {summary.output_token_rate:,.0f} output tokens/s, "
            f"{summary.total_token_rate:,.0f} tokens/s in all"
        ),
    ]
    if summary.goodput is not None:
        found.append(f"goodput: {summary.goodput:.2f} requests/s met every objective")
    if summary.send_delay_ms > 50:
        found.append(
            f"requests were sent up to {summary.send_delay_ms:,.0f} ms late (p99): no place was free, or this process "
            "is the limit"
        )
    return found


def as_json(
    parameters: Mapping[str, Any], summary: Summary, samples: Sequence[RequestSample]
) -> dict[str, Any]:
    """All that was measured. `parameters` state how."""
    return {
        "parameters": dict(parameters),
        "summary": asdict(summary),
        "requests": [
            {
                "planned_s": round(sample.planned_s, 6),
                "start_s": round(sample.start_s, 6),
                "end_s": round(sample.end_s, 6),
                "ttft_s": sample.ttft_s,
                "prompt_tokens": sample.prompt_tokens,
                "output_tokens": sample.output_tokens,
                "failure": sample.failure,
                "detail": sample.detail,
            }
            for sample in samples
        ],
    }


def draw(samples: Sequence[RequestSample], title: str) -> str:
    """An SVG with the cumulative distribution of each kind of time, on a logarithmic axis."""
    complete = [sample for sample in samples if not sample.failure]
    height = _HEIGHT * len(OBJECTIVES) + 30
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            'font-size="11">'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="18" font-size="13">{_escaped(title)}</text>',
    ]
    for number, name in enumerate(OBJECTIVES):
        found = sorted(1e3 * value for value in values(complete, name))
        parts += _panel(LABELS[name], found, 30 + number * _HEIGHT)
    return "\n".join([*parts, "</svg>", ""])


def _panel(label: str, found: Sequence[float], top: int) -> list[str]:
    left, right = _MARGIN, _WIDTH - 16
    upper, lower = top + 20, top + _HEIGHT - 24
    parts = [f'<text x="{left}" y="{top + 12}">{label}, ms (share of all that are shorter)</text>']
    if not found:
        return [*parts, f'<text x="{left}" y="{upper + 20}" fill="#777">none measured</text>']
    first = math.floor(math.log10(max(found[0], 1e-3)))
    last = max(first + 1, math.ceil(math.log10(max(found[-1], 1e-3))))

    def x_of(value: float) -> float:
        share = (math.log10(max(value, 1e-3)) - first) / (last - first)
        return left + share * (right - left)

    for power in range(first, last + 1):
        x = x_of(10.0**power)
        parts.append(f'<path d="M{x:.1f} {upper}V{lower}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{lower + 14}" text-anchor="middle">{10.0**power:g}</text>'
        )
    for share in (0.0, 0.5, 1.0):
        y = lower - share * (lower - upper)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#eee"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    # At most as many points as pixels.
    step = max(1, len(found) // (right - left))
    points = [(found[i], (i + 1) / len(found)) for i in range(0, len(found), step)]
    points.append((found[-1], 1.0))
    path = "L".join(f"{x_of(v):.1f} {lower - s * (lower - upper):.1f}" for v, s in points)
    parts.append(f'<path d="M{path}" fill="none" stroke="#1b6ca8" stroke-width="1.5"/>')
    return parts


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
