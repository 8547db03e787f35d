"""Tables and the picture of data_plane.py. Pure."""

from __future__ import annotations

import math

Rates = dict[int, dict[str, float]]
"""GB/s by block bytes and column."""

_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 720, 420, 50, 180
_COLOURS = (
    "#0b6e99",
    "#d9480f",
    "#2b8a3e",
    "#862e9c",
    "#c92a2a",
    "#5c940d",
    "#495057",
    "#e67700",
    "#1864ab",
)


def table(best: Rates) -> str:
    columns = list(next(iter(best.values())))
    lines = ["| block | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for block, row in best.items():
        cells = " | ".join(f"{row[name]:.2f}" for name in columns)
        lines.append(f"| {block // 1024} KiB | {cells} |")
    return "\n".join(lines)


RATIOS = {
    "mooncake / better raw": ("mooncake", ("raw_mooncake", "raw_mooncake_packed"), 1.0),
    "mooncake / staged": ("mooncake", ("raw_mooncake_staged",), 0.9),
    "same_host / raw": ("same_host", ("raw_process_vm",), 0.8),
    "same_host / nixl_auto": ("same_host", ("nixl_auto",), 1.0),
    "auto / same_host": ("auto", ("same_host",), 0.9),
}
"""Column over the best of others, and what it should reach at every block size. Staged means 1 MiB writes."""


def ratio_table(best: Rates) -> str:
    present = next(iter(best.values())).keys()
    shown = {
        title: (ours, others, target)
        for title, (ours, others, target) in RATIOS.items()
        if ours in present and all(other in present for other in others)
    }
    heads = [f"{title} (target {target:g})" for title, (_, _, target) in shown.items()]
    lines = ["| block | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for block, row in best.items():
        cells = []
        for ours, others, target in shown.values():
            ratio = row[ours] / max(row[other] for other in others)
            cells.append(f"{ratio:.2f}{'' if ratio >= target else ' below'}")
        lines.append(f"| {block // 1024} KiB | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(best: Rates) -> str:
    """A picture of the table as SVG, both axes logarithmic."""
    columns = list(next(iter(best.values())))
    values = [rate for row in best.values() for rate in row.values()]
    low = 10 ** math.floor(math.log10(min(values)))
    high = 10 ** math.ceil(math.log10(max(values)))
    first, last = min(best), max(best)

    def x(block: int) -> float:
        span = math.log(last / first) or 1.0
        return _MARGIN + (_WIDTH - _MARGIN - _LEGEND) * math.log(block / first) / span

    def y(rate: float) -> float:
        return 20 + (_HEIGHT - _MARGIN - 20) * math.log(high / rate) / math.log(high / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    steps = [low * 10**power * step for power in range(9) for step in (1, 2, 5)]
    parts += [
        f'<path d="M{_MARGIN} {y(rate):.1f}H{_WIDTH - _LEGEND}" stroke="#dee2e6"/>'
        f'<text x="{_MARGIN - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:g}</text>'
        for rate in steps
        if rate <= high
    ]
    parts += [
        f'<text x="{x(block):.1f}" y="{_HEIGHT - 30}" text-anchor="middle">{block // 1024}</text>'
        for block in best
    ]
    parts += [
        f'<text x="{(_WIDTH - _LEGEND) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">block, KiB</text>',
        '<text x="6" y="12">GB/s</text>',
    ]
    for number, column in enumerate(columns):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x(block):.1f},{y(row[column]):.1f}" for block, row in best.items())
        line = 30 + 18 * number
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{_WIDTH - _LEGEND + 10}" y="{line}" fill="{colour}">{column}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
