"""Samples and tables of the goodput benchmark. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.placement.report import percentile

ATTAINED_MIN: Final = 0.9
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

    `factors` are its own bounds, where it has them.
    """

    token_ms: tuple[float, ...]
    failed: bool = False
    prompt_tokens: int = 0
    factors: Factors | None = None

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
    """

    way: str
    load: str
    rate: float
    seed: int
    answers: tuple[Answer, ...]
    idle: float
    stretch: float

    @property
    def valid(self) -> bool:
        """Whether the engines kept their pace beside everything else."""
        return self.idle >= IDLE_MIN and self.stretch <= STRETCH_MAX


def attained(answers: Sequence[Answer], alone: Objective, factors: Factors | None) -> float:
    """The share of good requests. Without `factors`, each has its own."""
    good = sum(one.keeps(alone.times(factors or one.factors or FACTORS[0])) for one in answers)
    return good / len(answers) if answers else 0.0


def goodput(shares: Mapping[float, float]) -> float:
    """The highest rate up to which enough requests were good at every measured rate. 0 when there is none."""
    good = itertools.takewhile(lambda rate: shares[rate] >= ATTAINED_MIN, sorted(shares))
    return max(good, default=0.0)


def next_rate(shares: Mapping[float, float], low: float, high: float) -> float | None:
    """Where a search between two rates measures next. None when goodput is known to 5 %."""
    best = max(goodput(shares), low)
    worse = min((rate for rate in shares if rate > best), default=high)
    return None if worse <= 1.05 * best else round((best * worse) ** 0.5, 2)


def asked_factors(answers: Sequence[Answer]) -> set[Factors | None]:
    """The bounds that the requests carried."""
    return {one.factors for one in answers}


def goodput_table(blocks: Sequence[Block], alone: Objective) -> str:
    """A row for each pair of bounds and way, with the share of good requests at each rate."""
    rates = sorted({block.rate for block in blocks})
    titles = ("TTFT and TPOT at most", "way", *(f"{rate:g}/s" for rate in rates), "goodput")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    own = any(len(asked_factors(block.answers)) > 1 for block in blocks)
    for factors in (None,) if own else FACTORS:
        for way in dict.fromkeys(block.way for block in blocks):
            shares = {}
            for rate in rates:
                answers = [
                    answer
                    for block in blocks
                    if (block.way, block.rate) == (way, rate)
                    for answer in block.answers
                    if factors is None or answer.factors in (None, factors)
                ]
                if answers:
                    shares[rate] = attained(answers, alone, factors)
            if shares:
                name = _bounds(alone, factors) if factors else "each its own"
                cells = [f"{100 * shares[rate]:.0f} %" if rate in shares else "-" for rate in rates]
                lines.append(
                    f"| {' | '.join((name, name_of(way), *cells, f'{goodput(shares):g}/s'))} |"
                )
    return "\n".join(lines)


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
    }
    terms = {"least": "fewest requests first", "alternating": "in turn", "http": "over HTTP"}
    parts = [names[first]]
    if rest[:1] and rest[0].isdigit():
        parts.append(f"{rest[0]} prefill and {rest[1]} decode")
        rest = rest[2:]
    by = {"decode", "prefill", "hidden"}
    parts += [f"first token by {one}" if one in by else terms.get(one, one) for one in rest]
    return ", ".join([*parts, *([f"steps of {step}"] if step else [])])


def _bounds(alone: Objective, factors: Factors) -> str:
    return f"{factors[0]:g} x {alone.ttft_ms:,.0f} ms, {factors[1]:g} x {alone.tpot_ms:.1f} ms"


def times_table(blocks: Sequence[Block], step_ms: float) -> str:
    """A row for each rate, way and pair of bounds that requests carried. The last columns say whether it is valid."""
    titles = (
        *("requests/s", "way", "bounds", "TTFT p50, ms", "p90, ms", "p99, ms", "p50, steps"),
        *("TPOT p50, ms", "p99, ms", "p50, steps", "gap p99, ms", "requests", "failed"),
        *("idle", "steps beside the model"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for block in sorted(blocks, key=lambda one: (one.rate, one.seed)):
        whole = [answer for answer in block.answers if answer.token_ms and not answer.failed]
        if not whole:
            continue
        gaps_ms = [
            after - before
            for answer in whole
            for before, after in itertools.pairwise(answer.token_ms)
        ]
        ttft_ms = [answer.ttft_ms for answer in whole]
        tpot_ms = [answer.tpot_ms for answer in whole]
        carried = asked_factors(block.answers)
        one = next(iter(carried)) if len(carried) == 1 else None
        cells = (
            *(f"{block.rate:g}", name_of(block.way), f"{one[0]:g} x, {one[1]:g} x" if one else "-"),
            *(f"{percentile(ttft_ms, share):,.0f}" for share in (0.5, 0.9, 0.99)),
            f"{percentile(ttft_ms, 0.5) / step_ms:.1f}",
            *(f"{percentile(tpot_ms, share):,.0f}" for share in (0.5, 0.99)),
            f"{percentile(tpot_ms, 0.5) / step_ms:.2f}",
            f"{percentile(gaps_ms, 0.99):,.0f}",
            *(str(len(block.answers)), str(len(block.answers) - len(whole))),
            *(
                f"{100 * block.idle:.0f} %",
                f"{block.stretch:.3f}{'' if block.valid else ', not valid'}",
            ),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
