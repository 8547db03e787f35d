"""Table of the goodput benchmark. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.placement.report import percentile

ATTAINED_MIN = 0.9


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


def attained(answers: Sequence[Answer], objective: Objective) -> float:
    """The share of good requests."""
    return sum(answer.keeps(objective) for answer in answers) / len(answers)


def table(answers: Answers, objective: Objective) -> str:
    """A row for each rate and way."""
    titles = (
        *("requests/s", "way", "good", "TTFT p50, ms", "TTFT p99, ms"),
        *("TPOT p50, ms", "TPOT p99, ms", "gap p99, ms", "requests", "failed"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for rate, ways in answers.items():
        for way, found in ways.items():
            whole = [answer for answer in found if answer.token_ms and not answer.failed]
            gaps_ms = [
                after - before
                for answer in whole
                for before, after in zip(answer.token_ms, answer.token_ms[1:], strict=False)
            ]
            ttft_ms = [answer.ttft_ms for answer in whole]
            tpot_ms = [answer.tpot_ms for answer in whole]
            figures = (
                *(_figure(ttft_ms, 0.5), _figure(ttft_ms, 0.99)),
                *(_figure(tpot_ms, 0.5), _figure(tpot_ms, 0.99), _figure(gaps_ms, 0.99)),
            )
            cells = (
                f"{rate:g}",
                way,
                f"{100 * attained(found, objective):.0f} %",
                *figures,
                str(len(found)),
                str(len(found) - len(whole)),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(values_ms: Sequence[float], share: float) -> str:
    return f"{percentile(values_ms, share):,.0f}" if values_ms else "-"


def goodput(answers: Answers, objective: Objective) -> dict[str, float]:
    """For each way, the highest measured rate at which enough requests are good. 0 when there is none."""
    best: dict[str, float] = {}
    for rate, ways in answers.items():
        for way, found in ways.items():
            reached = rate if attained(found, objective) >= ATTAINED_MIN else 0.0
            best[way] = max(best.get(way, 0.0), reached)
    return best
