"""Predicts the next value of a series, such as the requests of an interval. Pure.

The Kalman filter is the local linear trend with the constants of Dynamo's planner: a level and a slope, with noise of
variance 1.0 and 0.1, and observations of variance 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

_LEVEL_NOISE: Final = 1.0
_SLOPE_NOISE: Final = 0.1
_OBSERVATION_NOISE: Final = 10.0
_START_VARIANCE: Final = 1000.0
_POINTS_MIN: Final = 5
"""With fewer values, the last one is the prediction."""
_GROWTH_MAX: Final = 10.0
"""A load that grows more than that from one period to the next does not repeat itself."""

Predictor = Callable[[Sequence[float]], float]
"""The next value of a series, which is not empty. The result is finite and not negative."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A predicted value, the predictor's name, and that predictor's mean error on the end of the history."""

    value: float
    predictor: str
    mean_error: float


def last_value(history: Sequence[float]) -> float:
    """The last value again."""
    return max(0.0, history[-1])


def local_trend(history: Sequence[float]) -> float:
    """Level plus slope of a Kalman filter."""
    if len(history) < _POINTS_MIN:
        return last_value(history)
    level, slope = history[0], 0.0
    # The covariance of level and slope: ((a, b), (b, d)).
    a, b, d = _START_VARIANCE, 0.0, _START_VARIANCE
    for value in history[1:]:
        level += slope
        a, b, d = a + 2 * b + d + _LEVEL_NOISE, b + d, d + _SLOPE_NOISE
        total = a + _OBSERVATION_NOISE
        level_gain, slope_gain = a / total, b / total
        error = value - level
        level, slope = level + level_gain * error, slope + slope_gain * error
        a, b, d = (1 - level_gain) * a, (1 - level_gain) * b, d - slope_gain * b
    return max(0.0, level + slope)


def seasonal(period: int) -> Predictor:
    """A predictor for a load with a period: the value one period ago, times the growth since then.

    Growth is the ratio of the means of the last quarter of a period and of the same quarter one period before. It is at
    most 10.
    """

    def predict(history: Sequence[float]) -> float:
        window = max(1, period // 4)
        if len(history) < period + window:
            return last_value(history)
        recent = sum(history[-window:])
        before = sum(history[-window - period : -period])
        growth = min(_GROWTH_MAX, recent / before) if before > 0 else 1.0
        return max(0.0, history[-period] * growth)

    return predict


def forecast(history: Sequence[float], period: int, backtest_share: float) -> Forecast:
    """The prediction of the predictor with the least error on the last `backtest_share` of the history.

    `period` is the length of the load's season in values, 0 for none. Values before the first request are skipped: a
    service without users has no trend. Values that are not finite count as 0. Without values, the prediction is 0.
    """
    values = _from_first_request(history)
    if not values:
        return Forecast(0.0, "last value", 0.0)
    predictors: dict[str, Predictor] = {"last value": last_value, "local trend": local_trend}
    if period:
        predictors["seasonal"] = seasonal(period)
    start = max(1, len(values) - math.ceil(len(values) * backtest_share))
    errors = {name: _mean_error(predict, values, start) for name, predict in predictors.items()}
    best = min(errors, key=lambda name: errors[name])
    return Forecast(predictors[best](values), best, errors[best])


def _from_first_request(history: Sequence[float]) -> list[float]:
    values = [value if math.isfinite(value) and value > 0 else 0.0 for value in history]
    first = next((index for index, value in enumerate(values) if value), len(values))
    return values[first:]


def _mean_error(predict: Predictor, values: Sequence[float], start: int) -> float:
    """Mean absolute error of the predictions of values[start:], each from the values before it."""
    errors = [abs(predict(values[:index]) - values[index]) for index in range(start, len(values))]
    return sum(errors) / len(errors) if errors else 0.0
