"""Tables and the picture of data_plane.py. Pure."""

from __future__ import annotations

import math

Rates = dict[int, dict[str, float]]
"""GB/s by block bytes and column."""

_WIDTH, _HEIGHT, _LEGEND, _LINE = 860, 480, 210, 16
_LEFT, _TOP, _BOTTOM = 56, 66, 430
_STEPS = tuple(float(f"{step}e{power}") for power in range(-4, 4) for step in (1, 2, 5))
_TITLE = "Writing in blocks on one host: ours (bold) beside bare calls and NIXL"
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
}
"""The column divided by the best of others, and the target at every block size. Staged means 1 MiB writes."""


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
    """The table as an SVG with logarithmic axes. Our ways are thick lines, the others thin ones."""
    low, high = _bounds(best)
    first, last = min(best), max(best)
    right = _WIDTH - _LEGEND

    def x(block: int) -> float:
        return _LEFT + (right - _LEFT) * math.log(block / first) / (math.log(last / first) or 1.0)

    def y(rate: float) -> float:
        return _TOP + (_BOTTOM - _TOP) * math.log(high / rate) / math.log(high / low)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        ),
        f'<text x="16" y="24" font-size="15" font-weight="bold">{_TITLE}</text>',
        f'<text x="{_LEFT}" y="{_TOP - 12}">GB/s</text>',
        (
            f'<text x="{(_LEFT + right) / 2}" y="{_BOTTOM + 38}" text-anchor="middle">'
            "block, KiB (both axes logarithmic)</text>"
        ),
    ]
    parts += [
        f'<path d="M{_LEFT} {y(rate):.1f}H{right}" stroke="#dee2e6"/>'
        f'<text x="{_LEFT - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:g}</text>'
        for rate in _STEPS
        if low <= rate <= high
    ]
    parts += [
        f'<text x="{x(block):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{block // 1024}</text>'
        for block in best
    ]
    names = list(next(iter(best.values())))
    labels = _spread({name: y(best[last][name]) for name in names})
    for number, name in enumerate(names):
        colour = _COLOURS[number % len(_COLOURS)]
        ours = not name.startswith(("raw_", "nixl_"))
        width, dashes = ("3", "none") if ours else ("1.5", "5 3")
        points = [(x(block), y(row[name])) for block, row in best.items()]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}" '
            f'stroke-dasharray="{dashes}"/>'
            f'<path d="M{right + 3} {points[-1][1]:.1f}L{right + 22} {labels[name]:.1f}" stroke="{colour}"/>'
            f'<text x="{right + 26}" y="{labels[name] + 4:.1f}" fill="{colour}" '
            f'font-weight="{"bold" if ours else "normal"}">{name.replace("_", " ")}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _bounds(best: Rates) -> tuple[float, float]:
    """The steps 1, 2 and 5 of every power of ten within the range."""
    values = [rate for row in best.values() for rate in row.values()]
    low = max((step for step in _STEPS if step <= min(values)), default=min(values))
    return low, min((step for step in _STEPS if step >= max(values)), default=max(values))


def _spread(wanted: dict[str, float]) -> dict[str, float]:
    """Places labels near their values, one under the other without overlap."""
    placed: dict[str, float] = {}
    above = -math.inf
    for name, at in sorted(wanted.items(), key=lambda item: item[1]):
        above = placed[name] = max(at, above + _LINE)
    return placed
