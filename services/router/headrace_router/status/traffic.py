"""Rates and percentiles of the requests that ended lately, from counts that only grow."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

WINDOW_S: Final = 60.0
ERRORS_MAX: Final = 8
"""Reasons of errors that are listed, the most frequent first."""
_CANCELLED: Final = "CANCELLED"
_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class BucketSums:
    """Counts of values up to each bound in seconds, and beyond the last one."""

    bounds: Sequence[float] = ()
    counts: Sequence[int] = ()

    def since(self, earlier: BucketSums) -> BucketSums:
        """The values that came after `earlier`."""
        before = earlier.counts or [0] * len(self.counts)
        return BucketSums(self.bounds, [b - a for a, b in zip(before, self.counts, strict=True)])

    def quantiles_ms(self) -> dict[str, float | None]:
        """Quantiles, linear within a bucket. None without values."""
        return {name: self._quantile_ms(share) for name, share in _QUANTILES.items()}

    def _quantile_ms(self, share: float) -> float | None:
        wanted = share * sum(self.counts)
        if not wanted:
            return None
        lower = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count >= wanted:
                return round(1e3 * (lower + (bound - lower) * wanted / count), 3)
            wanted -= count
            lower = bound
        return round(1e3 * lower, 3)


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """Sums since the start of the router. `ended` has finish reasons, and the reasons of errors in capitals."""

    ended: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    answer_tokens: int = 0
    first_tokens: BucketSums = field(default_factory=BucketSums)
    gaps: BucketSums = field(default_factory=BucketSums)


class Traffic:
    """Compares the counts with those of up to WINDOW_S ago. One event loop owns it."""

    def __init__(
        self, read: Callable[[], TrafficCounts], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock = clock
        self._samples: deque[tuple[float, TrafficCounts]] = deque([(clock(), TrafficCounts())])

    def sample(self) -> dict[str, Any]:
        """The traffic since the oldest sample of the window. Where that has none, since the last one before."""
        now_s, counts = self._clock(), self._read()
        while len(self._samples) > 1 and self._samples[0][0] < now_s - WINDOW_S:
            self._samples.popleft()
        then_s, earlier = self._samples[0]
        self._samples.append((now_s, counts))
        window_s = max(1e-3, now_s - then_s)
        ended = counts.ended - earlier.ended
        errors = Counter(dict(_errors(ended)))
        return {
            "window_s": round(window_s, 1),
            "requests_s": round(ended.total() / window_s, 2),
            "prompt_tokens_s": round((counts.prompt_tokens - earlier.prompt_tokens) / window_s, 1),
            "answer_tokens_s": round((counts.answer_tokens - earlier.answer_tokens) / window_s, 1),
            "errors": errors.total(),
            "errors_by_reason": dict(errors.most_common(ERRORS_MAX)),
            "ttft_ms": counts.first_tokens.since(earlier.first_tokens).quantiles_ms(),
            "gap_ms": counts.gaps.since(earlier.gaps).quantiles_ms(),
        }


def _errors(ended: Counter[str]) -> Iterator[tuple[str, int]]:
    for reason, count in ended.items():
        if reason.isupper() and reason != _CANCELLED:
            yield reason, count
