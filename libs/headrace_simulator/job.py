"""A request on its way through the simulation, what was measured of it, and the result of all requests."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace_common.callers.priority import Priority
from headrace_simulator.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What was measured of one request. `failure` is the reason of the error, empty after success.

    `itl_s` is the mean time between the tokens of the answer, 0 for a single token. `cached_tokens` are the prompt
    tokens that no worker computed.
    """

    request: TraceRequest
    arrival_s: float
    ttft_s: float = math.inf
    itl_s: float = math.inf
    e2e_s: float = math.inf
    cached_tokens: int = 0
    failure: str = ""

    @property
    def end_s(self) -> float:
        """When the answer ended."""
        return self.arrival_s + self.e2e_s

    def meets(self, ttft_s: float, itl_s: float) -> bool:
        """Whether the request reached both goals."""
        return not self.failure and self.ttft_s <= ttft_s and self.itl_s <= itl_s


class Job:
    """One request. `token_words` and `hashes` are those of the whole blocks of its prompt."""

    def __init__(self, request: TraceRequest, token_words: bytes, hashes: list[int]) -> None:
        self.request = request
        self.token_words = token_words
        self.hashes = hashes
        self.prompt_tokens = request.prompt_tokens
        self.answer_tokens = request.answer_tokens
        self.priority = request.priority
        loop = asyncio.get_running_loop()
        self.arrival_s = loop.time()
        self.first_token_s = 0.0
        self.end_s = 0.0
        self.cached_tokens = 0
        self.finished: asyncio.Future[None] = loop.create_future()

    @property
    def transfer_id(self) -> str:
        """Unique, since a simulated request has one attempt."""
        return f"t{self.request.number}"

    @property
    def has_first_token(self) -> bool:
        """Whether the first token of the answer was generated."""
        return self.first_token_s > 0

    def prefilled(self, cached_tokens: int) -> None:
        """A worker has computed the prompt, without the cached tokens."""
        self.cached_tokens = cached_tokens

    def made_first_token(self, now_s: float) -> None:
        """The first token of the answer was generated."""
        self.first_token_s = now_s

    def made_last_token(self, now_s: float) -> None:
        """The answer is complete."""
        self.end_s = now_s
        if not self.finished.done():
            self.finished.set_result(None)

    def outcome(self) -> RequestOutcome:
        """What was measured of the complete request."""
        gaps = max(1, self.answer_tokens - 1)
        return RequestOutcome(
            self.request,
            self.arrival_s,
            ttft_s=self.first_token_s - self.arrival_s,
            itl_s=(self.end_s - self.first_token_s) / gaps,
            e2e_s=self.end_s - self.arrival_s,
            cached_tokens=self.cached_tokens,
        )

    def failed(self, reason: str) -> RequestOutcome:
        """What was measured of a request that failed."""
        return RequestOutcome(self.request, self.arrival_s, failure=reason)


PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one kind in seconds. `percentiles` by their number."""

    mean_s: float
    percentiles: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """A decision that changed the numbers of workers. `time_s` is from the start of the trace."""

    time_s: float
    prefill_workers: int
    decode_workers: int
    both_workers: int


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
    both_worker_hours: float
    changes: Sequence[ChangeRow]
    classes: Sequence[ClassResult] = ()

    @property
    def worker_hours(self) -> float:
        """Hours of all workers together."""
        return self.prefill_worker_hours + self.decode_worker_hours + self.both_worker_hours


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
