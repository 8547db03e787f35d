"""Draw the picture of the README: goodput by bounds and way, from the figures of bench/results.

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

_OURS: Final = "Headrace"
_WIDTH: Final = 880
_LEFT: Final = 390
_BAR_MAX: Final = 420
_ROW: Final = 24
_PANEL_TOP: Final = 54
_STYLE: Final = (
    ".back { fill: #ffffff } text { fill: #222222 } .others { fill: #9aa5b1 } .ours { fill: #b3541e } "
    "@media (prefers-color-scheme: dark) { .back { fill: #10151c } text { fill: #e6eaf0 } "
    ".others { fill: #667085 } .ours { fill: #e08a4f } }"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """The rows of the table of goodput with the same bounds: as "below 2.00/s" or "2.50/s", by way."""

    bounds: str
    goodput: dict[str, str]


def read_panels(results: str) -> list[Panel]:
    """The bounds in the table of goodput, in its order. Raises ValueError when there are none."""
    panels: dict[str, Panel] = {}
    names: list[str] = []
    for line in results.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "goodput" in cells:
            names = cells
        elif len(cells) == len(names) and (value := cells[names.index("goodput")]).endswith("/s"):
            panel = panels.setdefault(cells[0], Panel(cells[0], {}))
            panel.goodput[cells[1]] = value
    if not panels:
        raise ValueError("the results have no table of goodput")
    return list(panels.values())


def draw(panels: Sequence[Panel]) -> str:
    """The picture, readable on light and on dark pages."""
    heights = [_PANEL_TOP + _ROW * len(panel.goodput) for panel in panels]
    height = sum(heights) + 34
    longest = max(_rate(text) for panel in panels for text in panel.goodput.values())
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="sans-serif" font-size="13">'
        ),
        "<title>Goodput of engines, fixed splits and workers of both roles</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{height}"/>',
    ]
    for number, panel in enumerate(panels):
        top = sum(heights[:number]) + 34
        first, _, later = panel.bounds.partition(", ")
        heading = f"Requests/s with time to first token of {first} and {later} a token"
        parts.append(f'<text x="20" y="{top}" font-weight="bold">{escape(heading)}</text>')
        for row, (way, text) in enumerate(panel.goodput.items()):
            y = top + 12 + _ROW * row
            kind = "ours" if way.startswith(_OURS) else "others"
            bar = _BAR_MAX * _rate(text) / longest
            parts += [
                f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(way)}</text>',
                f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{bar:.1f}" height="18" rx="2"/>',
                f'<text x="{_LEFT + bar + 6:.1f}" y="{y + 14}">{text.removesuffix("/s")}</text>',
            ]
    parts.append(
        f'<text x="20" y="{height - 14}" font-size="12">Four engines at the pace of a 70B model on four H100, four '
        "times slower. At these rates 90 % of the requests were good</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _rate(text: str) -> float:
    return float(text.rsplit(maxsplit=1)[-1].removesuffix("/s"))


def main() -> None:
    """Writes the picture."""
    PICTURE.write_text(draw(read_panels(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
