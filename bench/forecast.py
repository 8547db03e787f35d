"""A back-test of predictors on simulated days: ours beside those of statsmodels.

    python -m bench.forecast [--days 3] [--intervals 30,300] [--output DIR]

The series are the requests of each interval in days of `bench.simulation.make_trace`, with another seed for each day. A
predictor gets all values before an interval, and predicts that interval. The last day counts. Statsmodels' models
are fitted again every hour, on the last four hours; the seasonal one every six hours, on the days before. Without
statsmodels (`pip install statsmodels`), its rows are left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.simulation.make_trace import DAY_S, day_entries
from headrace_planner.goal_decision import Predictor, forecast, last_value, local_trend, seasonal

Series = NDArray[np.float64]

_WINDOW_S: Final = 4 * 3_600.0
_REFIT_S: Final = 3_600.0
_SEASONAL_REFIT_S: Final = 6 * 3_600.0
_HARMONICS: Final = 6
_BACKTEST_SHARE: Final = 0.5
# The planner keeps so many values.
_HISTORY_MAX: Final = 100


def request_counts(days: int, interval_s: float) -> Series:
    """Requests of each interval."""
    times_s = [
        day * DAY_S + entry["timestamp"] / 1e3
        for day in range(days)
        for entry in day_entries(day + 1)
    ]
    edges = np.arange(0.0, days * DAY_S + interval_s / 2, interval_s)
    counts: Series = np.histogram(times_s, edges)[0].astype(np.float64)
    return counts


def one_by_one(predict: Predictor, series: Series, start: int) -> Series:
    """The predictions of series[start:], each from the values before it."""
    return np.array([predict(series[:end].tolist()) for end in range(start, len(series))])


def _recent(predict: Predictor) -> Predictor:
    return lambda history: predict(history[-_HISTORY_MAX:])


def _blocks(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(start, end, size):
        yield first, min(end, first + size)


def fitted_often(
    make_model: Callable[[Series], Any], series: Series, start: int, interval_s: float
) -> Series:
    """One-step predictions of a state-space model that is fitted again every hour."""
    window, block = round(_WINDOW_S / interval_s), round(_REFIT_S / interval_s)
    found = []
    for first, end in _blocks(start, len(series), block):
        fit = make_model(series[first - window : first]).fit(disp=0)
        longer = fit.append(series[first:end], refit=False)
        found.append(longer.predict(window, window + end - first - 1))
    predicted: Series = np.maximum(0.0, np.concatenate(found))
    return predicted


def fourier(length: int, interval_s: float) -> Series:
    """Waves of a day, as columns."""
    phase = 2 * math.pi * np.arange(length) * interval_s / DAY_S
    waves = [wave(k * phase) for k in range(1, _HARMONICS + 1) for wave in (np.sin, np.cos)]
    return np.column_stack(waves)


def fitted_seasonal(model_type: Any, series: Series, start: int, interval_s: float) -> Series:
    """One-step predictions of waves of a day with errors that follow ARIMA(1, 0, 1)."""
    waves, block = fourier(len(series), interval_s), round(_SEASONAL_REFIT_S / interval_s)
    found = []
    for first, end in _blocks(start, len(series), block):
        model = model_type(series[:first], exog=waves[:first], order=(1, 0, 1), trend="c")
        fit = model.fit(disp=0, maxiter=30)
        longer = fit.append(series[first:end], exog=waves[first:end], refit=False)
        found.append(longer.predict(first, end - 1))
    predicted: Series = np.maximum(0.0, np.concatenate(found))
    return predicted


def ways(interval_s: float) -> dict[str, Callable[[Series, int], Series]]:
    """Predictions of the end of a series, by the name of the predictor."""
    period = round(DAY_S / interval_s)

    def chosen(history: Any) -> float:
        return forecast(history[-_HISTORY_MAX:], 0, _BACKTEST_SHARE).value

    found: dict[str, Callable[[Series, int], Series]] = {
        "last value": lambda series, start: one_by_one(last_value, series, start),
        "local trend": lambda series, start: one_by_one(_recent(local_trend), series, start),
        "seasonal": lambda series, start: one_by_one(seasonal(period), series, start),
        "the planner's choice without a season": lambda series, start: one_by_one(
            chosen, series, start
        ),
    }
    if importlib.util.find_spec("statsmodels") is None:
        return found
    statespace = importlib.import_module("statsmodels.tsa.statespace.api")
    smoothing = importlib.import_module("statsmodels.tsa.statespace.exponential_smoothing")
    sarimax = statespace.SARIMAX

    def arima(order: tuple[int, int, int]) -> Callable[[Series, int], Series]:
        return lambda series, start: fitted_often(
            lambda values: sarimax(values, order=order), series, start, interval_s
        )

    for order in ((0, 1, 1), (1, 1, 1), (2, 1, 2)):
        found[f"statsmodels ARIMA{order}"] = arima(order)
    found["statsmodels ETS, damped trend"] = lambda series, start: fitted_often(
        lambda values: smoothing.ExponentialSmoothing(values, trend=True, damped_trend=True),
        series,
        start,
        interval_s,
    )
    found["statsmodels waves of a day with ARIMA(1, 0, 1) errors"] = lambda series, start: (
        fitted_seasonal(sarimax, series, start, interval_s)
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--intervals", default="30,300", help="seconds of an interval")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [
        "| interval, s | predictor | mean error, requests | beside the best of ours | squared error | CPU s |",
        "|---" * 6 + "|",
    ]
    for interval_s in map(float, options.intervals.split(",")):
        series = request_counts(options.days, interval_s)
        start = len(series) - round(DAY_S / interval_s)
        rows: list[tuple[str, float, float, float]] = []
        for name, way in ways(interval_s).items():
            begin_s = time.process_time()
            errors = way(series, start) - series[start:]
            used_s = time.process_time() - begin_s
            rows.append((name, float(np.abs(errors).mean()), float((errors**2).mean()), used_s))
        best = min(mean for name, mean, _, _ in rows if not name.startswith("statsmodels"))
        for name, mean, squared, used_s in rows:
            lines.append(
                f"| {interval_s:g} | {name} | {mean:.2f} | {mean / best:.2f} | {squared:.1f} | {used_s:.1f} |"
            )
            print(lines[-1], flush=True)
    text = _NOTES.format(days=options.days, table="\n".join(lines))
    if options.output:
        (options.output / "forecast.md").write_text(text)


_NOTES: Final = """# Predictors of the planner beside statsmodels

Made by `python -m bench.forecast`: requests of each interval of simulated days. The last of {days} days is predicted,
one interval at a time, each from all intervals before it.

{table}

"CPU" is that of all predictions and fits of a day.
"""


if __name__ == "__main__":
    main()
