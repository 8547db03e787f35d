"""Table of interference.py. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.placement.report import percentile

OURS = "Headrace, one prefill and one decode worker"
P99_RATIO_MAX = 0.5
STALL_MS = 500.0


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
