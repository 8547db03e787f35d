"""Rates and percentiles of the status page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace_router.status.traffic import WINDOW_S, BucketSums, Traffic, TrafficCounts

BOUNDS = (0.01, 0.1, 1.0)


@dataclass
class Source:
    """Counts and a clock that a test moves."""

    now_s: float = 0.0
    requests: int = 0
    failed: int = 0

    def read(self) -> TrafficCounts:
        ended = Counter(stop=self.requests, CANCELLED=1, NO_DECODE_WORKER=self.failed)
        counts = (0, self.requests, 0, 0)
        sums = BucketSums(BOUNDS, counts)
        return TrafficCounts(ended, 10 * self.requests, 5 * self.requests, sums, sums)


def test_rates_are_those_of_the_last_minute() -> None:
    source = Source()
    traffic = Traffic(source.read, lambda: source.now_s)
    source.now_s, source.requests = 1_000.0, 500
    # Without an earlier sample, it is the traffic since the start.
    assert traffic.sample()["window_s"] == 1_000.0
    source.now_s, source.requests, source.failed = 1_010.0, 600, 3
    shown = traffic.sample()
    assert shown["window_s"] == 10.0
    assert shown["requests_s"] == 10.3
    assert (shown["prompt_tokens_s"], shown["answer_tokens_s"]) == (100.0, 50.0)
    assert (shown["errors"], shown["errors_by_reason"]) == (3, {"NO_DECODE_WORKER": 3})
    source.now_s += WINDOW_S + 5
    assert traffic.sample()["window_s"] == WINDOW_S + 5


def test_quantiles_are_linear_within_a_bucket() -> None:
    sums = BucketSums(BOUNDS, (50, 49, 0, 1))
    assert sums.quantiles_ms() == {"p50": 10.0, "p90": 83.469, "p99": 100.0}
    assert BucketSums(BOUNDS, (0, 0, 0, 1)).quantiles_ms()["p50"] == 1_000.0
    assert BucketSums().quantiles_ms() == {"p50": None, "p90": None, "p99": None}
