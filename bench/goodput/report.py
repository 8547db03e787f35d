"""Samples and tables of the goodput benchmark. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.goodput.intervals import ATTAINED_MIN, Kept, goodput, goodput_text, interval, shares_of
from bench.placement.report import percentile

IDLE_MIN: Final = 0.2
STRETCH_MAX: Final = 1.05
"""A valid block had at least this share of the processors idle, and steps of at most so many times their model."""

Factors = tuple[float, float]
FACTORS: Final[tuple[Factors, ...]] = ((2, 4), (5, 4), (5, 2), (10, 1.5))
"""Bounds of the first token and of the later ones, as multiples of the times without load."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The bounds that a good request keeps: its time to the first token, and its mean time per later token."""

    ttft_ms: float
    tpot_ms: float

    def times(self, factors: Factors) -> Objective:
        """Bounds of so many times these."""
        return Objective(factors[0] * self.ttft_ms, factors[1] * self.tpot_ms)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. `token_ms` has the time of each token after the request was due. It ended early when `failed`.

    `factors` are its own bounds, where it has them. It was due `due_s` after the start of its block.
    """

    token_ms: tuple[float, ...]
    failed: bool = False
    prompt_tokens: int = 0
    factors: Factors | None = None
    due_s: float = 0.0

    @property
    def ttft_ms(self) -> float:
        """The wait for the first token."""
        return self.token_ms[0]

    @property
    def tpot_ms(self) -> float:
        """The mean time between two tokens."""
        return (self.token_ms[-1] - self.token_ms[0]) / max(1, len(self.token_ms) - 1)

    def keeps(self, objective: Objective) -> bool:
        """Whether the request is good."""
        if self.failed or not self.token_ms:
            return False
        return self.ttft_ms <= objective.ttft_ms and self.tpot_ms <= objective.tpot_ms


@dataclass(frozen=True, slots=True)
class Block:
    """The requests of one load, rate and seed at one way.

    `idle` is the share of the processors that was idle. `stretch` is the time of all steps over the modelled one.
    `computed_tokens`: of prompts, by all engines. `before` is what the engines got before. `fault`: what befell a
    worker meanwhile. `engines`: how many ran, every few seconds.
    """

    way: str
    load: str
    rate: float
    seed: int
    answers: tuple[Answer, ...]
    idle: float
    stretch: float
    computed_tokens: int = 0
    before: str = "mixed"
    fault: str = ""
    engines: tuple[int, ...] = ()

    @property
    def cached(self) -> float:
        """The share of the prompts' tokens that no engine computed."""
        return 1 - self.computed_tokens / max(1, sum(one.prompt_tokens for one in self.answers))

    @property
    def valid(self) -> bool:
        """Whether the engines kept their pace beside everything else."""
        return self.idle >= IDLE_MIN and self.stretch <= STRETCH_MAX


def attained(answers: Sequence[Answer], alone: Objective, factors: Factors | None) -> float:
    """The share of good requests. Without `factors`, each has its own."""
    good = sum(one.keeps(alone.times(factors or one.factors or FACTORS[0])) for one in answers)
    return good / len(answers) if answers else 0.0


def good_up_to(shares: Mapping[float, float]) -> float:
    """The highest rate up to which enough requests were good at every measured rate. 0 when there is none."""
    good = itertools.takewhile(lambda rate: shares[rate] >= ATTAINED_MIN, sorted(shares))
    return max(good, default=0.0)


def next_rate(shares: Mapping[float, float], low: float, high: float) -> float | None:
    """Where a search between two rates measures next. None when goodput is known to 5 %."""
    best = max(good_up_to(shares), low)
    worse = min((rate for rate in shares if rate > best), default=high)
    return None if worse <= 1.05 * best else round((best * worse) ** 0.5, 2)


def asked_factors(answers: Sequence[Answer]) -> set[Factors | None]:
    """The bounds that the requests carried."""
    return {one.factors for one in answers}


def goodput_table(blocks: Sequence[Block], alone: Objective) -> str:
    """A row for each pair of bounds and way, with the share of good requests at each rate, and the goodput."""
    rates = sorted({block.rate for block in blocks})
    titles = ("TTFT and TPOT at most", "way", *(f"{rate:g}/s" for rate in rates))
    lines = [row((*titles, "goodput", "less the best other way's")), rule(len(titles) + 2)]
    own = any(len(asked_factors(block.answers)) > 1 for block in blocks)
    for factors in (None,) if own else FACTORS:
        name = bounds_text(alone, factors) if factors else "each its own"
        ways = {
            way: kept
            for way in dict.fromkeys(block.way for block in blocks)
            if (kept := _kept([one for one in blocks if one.way == way], alone, factors))
        }
        shares = {way: shares_of(kept) for way, kept in ways.items()}
        for way, kept in ways.items():
            cells = [
                f"{100 * share:.0f} %" if (share := shares[way].get(rate)) is not None else "-"
                for rate in rates
            ]
            others = {other: goodput(shares[other]) for other in ways if other != way}
            beside = "-"
            if others:
                best = max(others, key=others.__getitem__)
                beside = f"{goodput(shares[way]) - others[best]:+.2f}"
                if (sure := interval(kept, ways[best])) is not None:
                    beside += f" ({sure[0]:+.2f} to {sure[1]:+.2f})"
            lines.append(row((name, name_of(way), *cells, goodput_text(shares[way]), beside)))
    return "\n".join(lines)


def _kept(blocks: Iterable[Block], alone: Objective, factors: Factors | None) -> Kept:
    """Whether each request of a way was good. Blocks with other bounds have none."""
    kept: dict[tuple[float, int], list[bool]] = {}
    for block in blocks:
        good = [
            answer.keeps(alone.times(factors or answer.factors or FACTORS[0]))
            for answer in block.answers
            if factors is None or answer.factors in (None, factors)
        ]
        if good:
            kept.setdefault((block.rate, block.seed), []).extend(good)
    return kept


def row(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    """The line below the titles of a table."""
    return "|---" * columns + "|"


def name_of(way: str) -> str:
    """What readers call a way."""
    kind, _, step = way.partition("@")
    first, *rest = kind.split("-")
    names = {
        "plain": "vLLM engines",
        "router": "vllm-router before vLLM servers",
        "mooncake": "vLLM's MooncakeConnector",
        "pools": "Headrace",
        "both": "Headrace, workers of both roles",
        "planned": "Headrace, workers of both roles, planner",
    }
    terms = {"least": "fewest requests first", "alternating": "in turn", "http": "over HTTP"}
    terms["divided"] = "prompts divided"
    parts = [names[first]]
    if rest[:1] and rest[0].isdigit():
        parts.append(f"{rest[0]} prefill and {rest[1]} decode")
        rest = rest[2:]
    by = {"decode", "prefill", "hidden"}
    parts += [f"first token by {one}" if one in by else terms.get(one, one) for one in rest]
    return ", ".join([*parts, *([f"steps of {step}"] if step else [])])


def bounds_text(alone: Objective, factors: Factors) -> str:
    """Bounds as multiples of the times alone."""
    return f"{factors[0]:g} x {alone.ttft_ms:,.0f} ms, {factors[1]:g} x {alone.tpot_ms:.1f} ms"


def times_table(blocks: Sequence[Block]) -> str:
    """A row for each rate, way and pair of bounds that requests carried, over all seeds.

    The last columns say whether the blocks are valid.
    """
    titles = (
        *("requests/s", "way", "bounds", "TTFT p50, ms", "p90, ms", "p99, ms"),
        *("TPOT p50, ms", "p99, ms", "gap p99, ms", "cached", "requests", "failed"),
        *("idle", "steps beside the model", "valid"),
    )
    lines = [row(titles), rule(len(titles))]
    for (rate, way, factors), group in _groups(blocks):
        answers = [answer for block in group for answer in block.answers]
        whole = [answer for answer in answers if answer.token_ms and not answer.failed]
        if not whole:
            continue
        gaps_ms = [
            after - before
            for answer in whole
            for before, after in itertools.pairwise(answer.token_ms)
        ]
        ttft_ms = [answer.ttft_ms for answer in whole]
        tpot_ms = [answer.tpot_ms for answer in whole]
        cells = (
            *(f"{rate:g}", name_of(way), f"{factors[0]:g} x, {factors[1]:g} x" if factors else "-"),
            *(f"{percentile(ttft_ms, share):,.0f}" for share in (0.5, 0.9, 0.99)),
            *(f"{percentile(tpot_ms, share):,.0f}" for share in (0.5, 0.99)),
            *(f"{percentile(gaps_ms, 0.99):,.0f}", _cached(group)),
            *(str(len(answers)), str(len(answers) - len(whole))),
            *(f"{100 * min(block.idle for block in group):.0f} %",),
            *(f"{max(block.stretch for block in group):.3f}",),
            *(f"{sum(block.valid for block in group)} of {len(group)}",),
        )
        lines.append(row(cells))
    return "\n".join(lines)


_Group = tuple[float, str, Factors | None]


def _groups(blocks: Sequence[Block]) -> list[tuple[_Group, list[Block]]]:
    """The blocks with the same rate, way and bounds. Requests with bounds of their own count as without."""
    found: dict[_Group, list[Block]] = {}
    for block in sorted(blocks, key=lambda one: one.rate):
        carried = asked_factors(block.answers)
        factors = next(iter(carried)) if len(carried) == 1 else None
        found.setdefault((block.rate, block.way, factors), []).append(block)
    return list(found.items())


def _cached(blocks: Sequence[Block]) -> str:
    """The share of the prompts' tokens that no engine computed, where it was counted."""
    if not all(block.computed_tokens for block in blocks):
        return "-"
    return f"{100 * sum(block.cached for block in blocks) / len(blocks):.0f} %"


def starts_table(blocks: Sequence[Block]) -> str:
    """First tokens after starts: of all starts, of each, and beside those of plain engines."""
    titles = (
        "requests/s",
        "before",
        "way",
        "TTFT p50, ms",
        "p90, ms",
        "p90 of each start, ms",
        "p90 beside plain",
    )
    lines = [row(titles), rule(len(titles))]
    for before in dict.fromkeys(block.before for block in blocks):
        plain: dict[float, float] = {}
        groups = _groups([block for block in blocks if block.before == before])
        for (rate, way, _), group in sorted(
            groups, key=lambda one: not one[0][1].startswith("plain")
        ):
            each = [_ttft_ms(block.answers) for block in group]
            pooled = [ttft_ms for one in each for ttft_ms in one]
            p90_ms = percentile(pooled, 0.9)
            if way.startswith("plain"):
                plain.setdefault(rate, p90_ms)
            lines.append(
                row(
                    (
                        *(f"{rate:g}", before, name_of(way), f"{percentile(pooled, 0.5):,.0f}"),
                        *(
                            f"{p90_ms:,.0f}",
                            ", ".join(f"{percentile(one, 0.9):,.0f}" for one in each),
                        ),
                        f"{p90_ms / plain[rate]:.2f}" if rate in plain else "-",
                    )
                )
            )
    return "\n".join(lines)


def _ttft_ms(answers: Sequence[Answer]) -> list[float]:
    """Times to the first token. That of a request without one is infinite."""
    return [answer.ttft_ms if answer.token_ms else float("inf") for answer in answers]


def day_table(blocks: Sequence[Block], alone: Objective) -> str:
    """The good requests of each way by its bounds, and the engines that it needed for them."""
    titles = (
        "requests/s at noon",
        "way",
        "bounds",
        "good",
        "engines, mean",
        "by tenths of the time",
    )
    lines = [row(titles), rule(len(titles))]
    for block in blocks:
        carried = [one for one in asked_factors(block.answers) if one]
        tenths = [
            statistics.fmean(
                block.engines[len(block.engines) * at // 10 :][: max(1, len(block.engines) // 10)]
            )
            for at in range(10)
        ]
        for factors in carried or FACTORS:
            good = attained(block.answers, alone, factors)
            cells = (
                f"{block.rate:g}",
                name_of(block.way),
                bounds_text(alone, factors),
                f"{100 * good:.0f} %",
            )
            mean = f"{statistics.fmean(block.engines):.2f}"
            lines.append(row((*cells, mean, " ".join(f"{one:.1f}" for one in tenths))))
    return "\n".join(lines)


def handover_table(blocks: Sequence[Block], prompt_ms: Mapping[int, float], step_ms: float) -> str:
    """First tokens less the computing of their prompts, and second tokens, in steps, by length and way."""
    titles = (
        *("prompt tokens", "way", "first token above the prompt p50, steps", "p90, steps"),
        *("second after first p50, steps", "p90, steps", "requests", "failed"),
    )
    lines = [row(titles), rule(len(titles))]
    for tokens in sorted(prompt_ms):
        for way in dict.fromkeys(block.way for block in blocks):
            answers = [
                answer
                for block in blocks
                if block.way == way
                for answer in block.answers
                if answer.prompt_tokens == tokens
            ]
            whole = [answer.token_ms for answer in answers if not answer.failed]
            if not whole:
                continue
            above = [(times[0] - prompt_ms[tokens]) / step_ms for times in whole]
            second = [(times[1] - times[0]) / step_ms for times in whole]
            parts = [percentile(one, share) for one in (above, second) for share in (0.5, 0.9)]
            counts = (str(len(answers)), str(len(answers) - len(whole)))
            lines.append(
                row((f"{tokens:,}", name_of(way), *(f"{part:.2f}" for part in parts), *counts))
            )
    return "\n".join(lines)
