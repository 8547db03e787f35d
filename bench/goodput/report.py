"""Tables of the goodput benchmark. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.placement.report import percentile

ATTAINED_MIN = 0.9
FACTORS = ((2, 4), (5, 4), (5, 2), (10, 1.5))
"""Bounds of the first token and of the later ones, as multiples of the times without load."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The bounds that a good request keeps: its time to the first token, and its mean time per later token."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. `token_ms` has the time of each token after the request was due. It ended early when `failed`."""

    token_ms: tuple[float, ...]
    failed: bool = False

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


# Answers of all rounds by requests per second, then by way.
Answers = Mapping[float, Mapping[str, Sequence[Answer]]]


def objectives(alone: Sequence[Answer]) -> dict[str, Objective]:
    """Bounds as multiples of the medians of requests without load, by name."""
    ttft_ms = statistics.median(answer.ttft_ms for answer in alone)
    tpot_ms = statistics.median(answer.tpot_ms for answer in alone)
    return {
        f"{first:g} x {ttft_ms:,.0f} ms, {later:g} x {tpot_ms:.1f} ms": Objective(
            first * ttft_ms, later * tpot_ms
        )
        for first, later in FACTORS
    }


OF_BOUNDS = ", bounds "
"""In the name of a way, before the bounds for which alone it was measured."""


def factors_of(name: str) -> str:
    """The factors in the name of an objective, such as "2, 4"."""
    first, later = (part.partition(" x ")[0] for part in name.split(" ms, "))
    return f"{first}, {later}"


def ways_of(ways: Iterable[str], name: str) -> list[str]:
    """The ways that were measured for an objective."""
    return [way for way in ways if way.partition(OF_BOUNDS)[2] in ("", factors_of(name))]


def attained(answers: Sequence[Answer], objective: Objective) -> float:
    """The share of good requests."""
    return sum(answer.keeps(objective) for answer in answers) / len(answers)


def goodput(answers: Answers, way: str, objective: Objective) -> float:
    """The highest rate up to which enough requests were good at every measured rate. 0 when there is none."""
    best = 0.0
    for rate in sorted(answers):
        if attained(answers[rate][way], objective) < ATTAINED_MIN:
            break
        best = rate
    return best


def goodput_table(answers: Answers, bounds: Mapping[str, Objective]) -> str:
    """A row for each objective and way, with the share of good requests at each rate."""
    rates = sorted(answers)
    titles = ("TTFT and TPOT at most", "way", *(f"{rate:g}/s" for rate in rates), "goodput")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, objective in bounds.items():
        for way in ways_of(answers[rates[0]], name):
            shares = (f"{100 * attained(answers[rate][way], objective):.0f} %" for rate in rates)
            cells = (
                name,
                way.partition(OF_BOUNDS)[0],
                *shares,
                f"{goodput(answers, way, objective):g}/s",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def times_table(answers: Answers) -> str:
    """A row for each rate and way."""
    titles = (
        *("requests/s", "way", "TTFT p50, ms", "TTFT p99, ms"),
        *("TPOT p50, ms", "TPOT p99, ms", "gap p99, ms", "requests", "failed"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for rate, ways in answers.items():
        for way, found in ways.items():
            whole = [answer for answer in found if answer.token_ms and not answer.failed]
            gaps_ms = [
                after - before
                for answer in whole
                for before, after in itertools.pairwise(answer.token_ms)
            ]
            ttft_ms = [answer.ttft_ms for answer in whole]
            tpot_ms = [answer.tpot_ms for answer in whole]
            cells = (
                *(f"{rate:g}", way, _figure(ttft_ms, 0.5), _figure(ttft_ms, 0.99)),
                *(_figure(tpot_ms, 0.5), _figure(tpot_ms, 0.99), _figure(gaps_ms, 0.99)),
                *(str(len(found)), str(len(found) - len(whole))),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(values_ms: Sequence[float], share: float) -> str:
    return f"{percentile(values_ms, share):,.0f}" if values_ms else "-"
