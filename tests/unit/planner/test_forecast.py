"""The prediction of requests."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_planner.goal_decision import predicted_count


def test_a_ramp_is_extended() -> None:
    history = [10.0 * step for step in range(1, 21)]
    assert predicted_count([0.0] * 50 + history) == pytest.approx(210, rel=0.02)
    assert predicted_count(history[:4]) == 40


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e9), max_size=60))
def test_predictions_are_finite_and_not_negative(history: list[float]) -> None:
    bounded = [value if abs(value) < 1e12 else math.nan for value in history]
    predicted = predicted_count(bounded)
    assert math.isfinite(predicted)
    assert predicted >= 0
