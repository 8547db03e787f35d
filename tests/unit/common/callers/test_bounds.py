"""Calls in flight of one caller are bounded, and no other caller is refused for them."""

from __future__ import annotations

import pytest

from headrace_common.callers.bounds import CALLERS_MAX, RateByCaller


def test_a_rate_forgets_with_time_and_knows_a_bounded_number_of_callers() -> None:
    now_s = 0.0
    rate = RateByCaller(10.0, 5.0, lambda: now_s)
    for _ in range(8):
        rate.count("a")
    assert rate.excess_s("a") == pytest.approx(0.3)
    assert not rate.excess_s("b")
    now_s = 0.31
    assert not rate.excess_s("a")
    for _ in range(8):
        rate.count("a")
    rate.count("much", 1_000.0)
    assert rate.excess_s("much") == pytest.approx(0.5), "a large debt is forgotten soon, too"
    for number in range(CALLERS_MAX):
        rate.count(f"other {number}")
    assert not rate.excess_s("a")
    assert len(rate._debts) == CALLERS_MAX
