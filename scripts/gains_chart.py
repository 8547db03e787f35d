"""Draw the picture of the README: what separate prefill workers gain and cost, from the figures of bench/results.

python scripts/gains_chart.py    rewrites docs/images/gains.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results" / "goodput.md"
PICTURE: Final = ROOT / "docs" / "images" / "gains.svg"

RATE: Final = "3"
"""Requests a second: the highest rate of the results at which every way keeps up."""
_PANELS: Final = (
    ("gap p99, ms", "Gain: gaps between tokens, 99th percentile, ms"),
    ("TTFT p50, ms", "Cost: time to first token, median, ms"),
)
_OURS: Final = "Headrace"
_WIDTH: Final = 820
_LEFT: Final = 330
_BAR_MAX: Final = 420
_ROW: Final = 24
_PANEL_TOP: Final = 54
_STYLE: Final = (
    ".back { fill: #ffffff } text { fill: #222222 } .others { fill: #9aa5b1 } .ours { fill: #b3541e } "
    "@media (prefers-color-scheme: dark) { .back { fill: #10151c } text { fill: #e6eaf0 } "
    ".others { fill: #667085 } .ours { fill: #e08a4f } }"
)


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table of times: the way to serve, and its figures by column."""

    name: str
    figures: dict[str, float]


def read_ways(results: str) -> list[Way]:
    """The ways in the table of times at RATE. Raises ValueError when there are none."""
    ways: list[Way] = []
    names: list[str] = []
    for line in results.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == "requests/s":
            names = cells
        elif names and cells[0] == RATE:
            row = dict(zip(names, cells, strict=True))
            figures = {column: float(row[column].replace(",", "")) for column, _ in _PANELS}
            ways.append(Way(row["way"], figures))
    if not ways:
        raise ValueError(f"the results have no times at {RATE} requests a second")
    return ways


def draw(ways: Sequence[Way]) -> str:
    """The picture, readable on light and on dark pages."""
    panel = _PANEL_TOP + _ROW * len(ways)
    height = panel * len(_PANELS) + 34
    title = f"Gaps between tokens and times to first token at {RATE} requests a second"
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="sans-serif" font-size="13">'
        ),
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{height}"/>',
    ]
    for number, (column, heading) in enumerate(_PANELS):
        top = panel * number + 34
        longest = max(way.figures[column] for way in ways)
        parts.append(f'<text x="20" y="{top}" font-weight="bold">{heading}</text>')
        for row, way in enumerate(ways):
            value = way.figures[column]
            y = top + 12 + _ROW * row
            kind = "ours" if way.name.startswith(_OURS) else "others"
            bar = _BAR_MAX * value / longest
            parts += [
                f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(way.name)}</text>',
                f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{bar:.1f}" height="18" rx="2"/>',
                f'<text x="{_LEFT + bar + 6:.1f}" y="{y + 14}">{value:,.0f}</text>',
            ]
    parts.append(
        f'<text x="20" y="{height - 14}" font-size="12">{RATE} requests a second, prompts of 256 to 1,536 tokens, '
        "one processor core for each engine</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Writes the picture."""
    PICTURE.write_text(draw(read_ways(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
