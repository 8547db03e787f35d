"""However many requests are refused, only a few retry for each free slot, and never none."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.admission import HINT_S_MAX, HINT_S_MIN, RETRIES_PER_COMPLETION, RetryHint


class Crowd:
    """Callers that retry after the hint, on a worker with one completion every `end_every_s`."""

    def __init__(self, callers: int, end_every_s: float) -> None:
        self.now_s = 0.0
        self.hint = RetryHint(lambda: self.now_s)
        self._random = random.Random(callers)
        self._retries_s = [self._random.uniform(0, HINT_S_MIN) for _ in range(callers)]
        heapq.heapify(self._retries_s)
        self._end_every_s = end_every_s
        self._ends_s = 0.0

    def requests_until(self, until_s: float) -> int:
        """The number of requests until then. A caller that gets the slot sends its next request after it."""
        requests = 0
        while self._retries_s[0] < until_s:
            self.now_s = self._retries_s[0]
            requests += 1
            free = self._ends_s <= self.now_s
            if free:
                self.hint.request_completed()
                self._ends_s = self.now_s + self._end_every_s
            wait_s = self._end_every_s if free else self.hint.request_refused()
            heapq.heapreplace(self._retries_s, self.now_s + wait_s * self._random.uniform(1.0, 1.5))
        return requests


@pytest.mark.parametrize("callers", [40, 100, 150])
def test_retries_settle_at_a_few_per_completion(callers: int) -> None:
    crowd = Crowd(callers, end_every_s=0.1)
    crowd.requests_until(20.0)
    requests_per_end = crowd.requests_until(60.0) / (40.0 / 0.1)
    assert 1.5 < requests_per_end < 2 * RETRIES_PER_COMPLETION


def test_a_few_callers_get_a_short_hint() -> None:
    crowd = Crowd(3, end_every_s=0.5)
    crowd.requests_until(20.0)
    assert crowd.hint.request_refused() < 0.5


def test_the_hint_resets_when_no_caller_is_left() -> None:
    crowd = Crowd(1_000, end_every_s=0.5)
    crowd.requests_until(20.0)
    assert crowd.hint.request_refused() == HINT_S_MAX
    crowd.now_s += 2 * HINT_S_MAX
    assert crowd.hint.request_refused() == HINT_S_MIN


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=200))
def test_hints_are_bounded(steps: list[tuple[float, bool]]) -> None:
    now_s = 0.0
    hint = RetryHint(lambda: now_s)
    for passed_s, ended in steps:
        now_s += passed_s
        if ended:
            hint.request_completed()
        else:
            assert HINT_S_MIN <= hint.request_refused() <= HINT_S_MAX
