"""Predictors, and the choice between them by their errors on the history."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_planner.goal_decision import forecast, last_value, local_trend

DAY = [20 + 15 * math.sin(2 * math.pi * hour / 24) for hour in range(24)]


def test_a_ramp_is_extended() -> None:
    history = [10.0 * step for step in range(1, 21)]
    assert local_trend(history) == pytest.approx(210, rel=0.02)
    assert last_value(history) == 200
    chosen = forecast(history, 0, 0.5)
    assert chosen.predictor == "local trend"
    assert chosen.mean_error < 10


def test_a_daily_load_is_predicted_by_the_day_before() -> None:
    history = DAY * 2 + DAY[:7]
    chosen = forecast(history, 24, 0.5)
    assert chosen.predictor == "seasonal"
    assert chosen.value == pytest.approx(DAY[7])


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e9), max_size=60),
    st.integers(0, 30),
    st.floats(0.01, 1.0),
)
def test_predictions_are_finite_and_not_negative(
    history: list[float], period: int, share: float
) -> None:
    bounded = [value if abs(value) < 1e12 else math.nan for value in history]
    chosen = forecast(bounded, period, share)
    assert math.isfinite(chosen.value)
    assert chosen.value >= 0
