"""The result of a replay. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace_common.callers.priority import Priority
from headrace_simulator.job import RequestOutcome

PERCENTILES: Final = (50, 90, 95, 99)
_HOUR_S: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one kind in seconds. `percentiles` by their number."""

    mean_s: float
    percentiles: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """A change of the numbers of workers."""

    time_s: float
    prefill_workers: int
    decode_workers: int


@dataclass(frozen=True, slots=True)
class ClassResult:
    """The requests of one class. `attainment` is its own share, and `goodput` its part of the whole."""

    priority: str
    requests: int
    failed: int
    ttft: Times
    itl: Times
    attainment: float
    goodput: float


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """`attainment`: the share of all requests that reached both goals. `goodput`: those a second.

    `cached_share`: the share of prompt tokens that no worker computed. `duration_s` is until the last answer ended.
    `classes` is empty when all requests have one class.
    """

    way: str
    scaling: str
    requests: int
    failures: Mapping[str, int]
    duration_s: float
    ttft: Times
    itl: Times
    e2e: Times
    attainment: float
    ttft_attainment: float
    itl_attainment: float
    goodput: float
    cached_share: float
    prefill_worker_hours: float
    decode_worker_hours: float
    changes: Sequence[ChangeRow]
    classes: Sequence[ClassResult] = ()

    @property
    def worker_hours(self) -> float:
        """Hours of all workers together."""
        return self.prefill_worker_hours + self.decode_worker_hours

    @property
    def changes_per_hour(self) -> float:
        """Changes of the numbers of workers in an hour."""
        return len(self.changes) * _HOUR_S / max(1e-9, self.duration_s)


def times_of(seconds: Sequence[float]) -> Times:
    """Mean and percentiles. 0 without values."""
    ordered = sorted(seconds)
    if not ordered:
        return Times(0.0, {f"p{percent}": 0.0 for percent in PERCENTILES})
    return Times(
        math.fsum(ordered) / len(ordered),
        {
            f"p{percent}": ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
            for percent in PERCENTILES
        },
    )


def attainment(outcomes: Sequence[RequestOutcome], ttft_s: float, itl_s: float) -> float:
    """The share of requests that reached both goals. Failed requests count as missed."""
    return sum(one.meets(ttft_s, itl_s) for one in outcomes) / max(1, len(outcomes))


def itl_times(outcomes: Sequence[RequestOutcome]) -> Times:
    """Times between tokens of complete answers with several."""
    return times_of(
        [one.itl_s for one in outcomes if not one.failure and one.request.answer_tokens > 1]
    )


def classes_of(
    outcomes: Sequence[RequestOutcome], ttft_s: float, itl_s: float, duration_s: float
) -> list[ClassResult]:
    """The result of each class, the highest first. Empty when all requests have one class."""
    present = sorted({one.request.priority for one in outcomes})
    if len(present) < 2:
        return []
    return [
        _class_result(
            priority,
            [one for one in outcomes if one.request.priority is priority],
            (ttft_s, itl_s),
            duration_s,
        )
        for priority in present
    ]


def _class_result(
    priority: Priority,
    outcomes: Sequence[RequestOutcome],
    goals: tuple[float, float],
    duration_s: float,
) -> ClassResult:
    met = attainment(outcomes, *goals)
    return ClassResult(
        priority=priority.label,
        requests=len(outcomes),
        failed=sum(bool(one.failure) for one in outcomes),
        ttft=times_of([one.ttft_s for one in outcomes if not one.failure]),
        itl=itl_times(outcomes),
        attainment=met,
        goodput=met * len(outcomes) / max(1e-9, duration_s),
    )


def failures_of(outcomes: Sequence[RequestOutcome]) -> dict[str, int]:
    """Failed requests by reason."""
    return dict(Counter(one.failure for one in outcomes if one.failure))
