"""Table and picture of interference.py. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.placement.report import percentile

OURS = "Headrace, one prefill and one decode worker"
P99_RATIO_MAX = 0.5
STALL_MS = 500.0
_WIDTH, _PANEL, _HEIGHT = 1000, 490, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 470, 112, 346
_OURS_COLOUR = "#1b6fc2"
_COLOURS = ("#d9480f", "#f0a35e", "#2b8a3e")
_DECADES = 3


@dataclass(frozen=True, slots=True)
class Block:
    """One way for some seconds. `gaps_ms` and `tokens` are those of the running answers, in `seconds`.

    `asked` and `answered` count prompts; `first_ms` are the times to their first tokens.
    """

    seconds: float
    gaps_ms: tuple[float, ...]
    tokens: int
    asked: int
    answered: int
    first_ms: tuple[float, ...]

    @property
    def summary(self) -> str:
        """A line of progress."""
        p50, p99 = (percentile(self.gaps_ms, share) for share in (0.5, 0.99))
        return f"p50 {p50:.1f}, p99 {p99:.1f} ms, {self.tokens} tokens, {self.answered} of {self.asked} prompts"


# Blocks by seconds between prompts, then by way.
Blocks = Mapping[float, Mapping[str, Sequence[Block]]]


def gaps_of(times_ns: Sequence[int], start_ns: int, end_ns: int) -> list[float]:
    """Milliseconds before each token within the window. Tokens that arrive together have no gap between them."""
    return [
        (now_ns - before_ns) / 1e6
        for before_ns, now_ns in itertools.pairwise(times_ns)
        if start_ns <= now_ns < end_ns
    ]


def all_gaps_ms(blocks: Sequence[Block]) -> list[float]:
    """Sum over all blocks."""
    return [gap_ms for block in blocks for gap_ms in block.gaps_ms]


def p99_ms(blocks: Sequence[Block]) -> float:
    """Gaps of all blocks."""
    return percentile(all_gaps_ms(blocks), 0.99)


def stalled_share(blocks: Sequence[Block]) -> float:
    """The part of the answers' time that is in gaps of over STALL_MS. A percentile may miss long gaps that are rare."""
    gaps_ms = all_gaps_ms(blocks)
    return sum(gap_ms for gap_ms in gaps_ms if gap_ms > STALL_MS) / sum(gaps_ms)


def table(blocks: Blocks) -> str:
    """A row for each interval and way."""
    titles = (
        *("a prompt every", "way", "p50, ms", "p99, ms", "longest, ms", "stalled", "tokens/s"),
        *("prompts/s", "answered", "prompts' TTFT p50, ms"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for every_s, ways in blocks.items():
        for way, found in ways.items():
            gaps_ms, seconds = all_gaps_ms(found), sum(block.seconds for block in found)
            first_ms = [first for block in found for first in block.first_ms]
            answered = sum(block.answered for block in found)
            cells = (
                f"{every_s:g} s" if every_s else "never",
                way,
                f"{percentile(gaps_ms, 0.5):.1f}",
                f"{percentile(gaps_ms, 0.99):.1f}",
                f"{max(gaps_ms):,.0f}",
                f"{stalled_share(found):.0%}",
                f"{sum(block.tokens for block in found) / seconds:.1f}",
                f"{answered / seconds:.2f}",
                f"{answered} of {sum(block.asked for block in found)}",
                f"{statistics.median(first_ms):,.0f}" if first_ms else "-",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def targets(blocks: Blocks) -> list[str]:
    """The target, and whether it was met."""
    lines = []
    for every_s, ways in blocks.items():
        if OURS not in ways or not every_s:
            continue
        for way, found in ways.items():
            if way == OURS:
                continue
            ratio = p99_ms(ways[OURS]) / p99_ms(found)
            met = "met" if ratio <= P99_RATIO_MAX else "MISSED"
            lines.append(
                f"- a prompt every {every_s:g} s: our p99 over that of {way} {ratio:.2f}, "
                f"wanted {P99_RATIO_MAX:g} at most: {met}"
            )
    return lines


def draw(blocks: Blocks, title: str) -> str:
    """The share of gaps above each length as an SVG, with a panel for each interval."""
    drawn = {every_s: ways for every_s, ways in blocks.items() if every_s}
    names = list(dict.fromkeys(way for ways in drawn.values() for way in ways))
    others = [name for name in names if name != OURS]
    colours = {**dict(zip(others, _COLOURS, strict=False)), OURS: _OURS_COLOUR}
    gaps_ms = [
        gap for ways in drawn.values() for found in ways.values() for gap in all_gaps_ms(found)
    ]
    low = math.log10(max(1.0, percentile(gaps_ms, 0.02)))
    high = math.log10(max(gaps_ms))
    width = max(_WIDTH, _PANEL * len(drawn))
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        ),
        f'<text x="16" y="24" font-size="15" font-weight="bold">{title}</text>',
        *_legend(names, colours),
    ]
    for number, (every_s, ways) in enumerate(drawn.items()):
        left = number * _PANEL
        lines += [f'<g transform="translate({left} 0)">']
        lines += _axes(f"a prompt every {every_s:g} s", low, high)
        for way, found in ways.items():
            lines.append(_tail(all_gaps_ms(found), low, high, colours[way]))
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


def _legend(names: Sequence[str], colours: Mapping[str, str]) -> Iterator[str]:
    left = 16.0
    for name in names:
        yield (
            f'<rect x="{left:.0f}" y="42" width="12" height="12" fill="{colours[name]}"/>'
            f'<text x="{left + 18:.0f}" y="52">{name}</text>'
        )
        left += 50 + 6.2 * len(name)


def _x(gap_ms: float, low: float, high: float) -> float:
    share = (math.log10(max(1e-3, gap_ms)) - low) / max(1e-9, high - low)
    return _LEFT + (_RIGHT - _LEFT) * min(1.0, max(0.0, share))


def _y(share: float) -> float:
    return _TOP + (_BOTTOM - _TOP) * min(1.0, -math.log10(max(1e-9, share)) / _DECADES)


def _axes(title: str, low: float, high: float) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="{_TOP - 28}" font-weight="bold">{title}</text>'
    yield f'<text x="{_LEFT}" y="{_TOP - 10}">share of gaps between tokens that are longer</text>'
    for power in range(_DECADES + 1):
        y = _y(10.0**-power)
        # The part above the line of 1 % starts at the p99.
        colour = "#868e96" if power == 2 else "#dee2e6"
        yield (
            f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="{colour}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * 10.0**-power:g} %</text>'
        )
    for gap_ms in (scale * step for scale in (1, 10, 100, 1000, 10_000) for step in (1, 2, 5)):
        if low <= math.log10(gap_ms) <= high:
            x = _x(gap_ms, low, high)
            yield (
                f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="#dee2e6"/>'
                f'<text x="{x:.1f}" y="{_BOTTOM + 17}" text-anchor="middle">{gap_ms:,}</text>'
            )
    yield (
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 36}" text-anchor="middle">'
        "ms between tokens, logarithmic</text>"
    )


def _tail(gaps_ms: Sequence[float], low: float, high: float, colour: str) -> str:
    ordered = sorted(gaps_ms)
    count = len(ordered)
    points = []
    for rank, gap_ms in enumerate(ordered):
        # Below the tail, a point for each hundredth is enough.
        if rank % max(1, count // 100) == 0 or rank > 0.97 * count:
            points.append(f"{_x(gap_ms, low, high):.1f},{_y((count - rank) / count):.1f}")
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
