"""The online fit: drift, and what other kinds have shown."""

from __future__ import annotations

from random import Random

import pytest

from headrace_common.time_model.fit import OnlineFit


def observed(
    count: int, seed: int = 1, noise: float = 0.0, fit: OnlineFit | None = None
) -> OnlineFit:
    """2 ms and 3 us for each unit of the second feature, with relative noise."""
    random, fit = Random(seed), fit or OnlineFit(2)
    for _ in range(count):
        units = random.uniform(10, 1_000)
        fit.observe((1.0, units), (0.002 + 3e-6 * units) * random.lognormvariate(0, noise))
    return fit


def test_a_slow_first_step_is_forgotten_soon() -> None:
    fit = OnlineFit(2)
    fit.observe((1.0, 500.0), 10.0)
    observed(30, fit=fit)
    assert fit.predict((1.0, 500.0)) == pytest.approx(0.0035, rel=0.15)


def test_drift_is_followed() -> None:
    fit, random = observed(1_000), Random(3)
    for _ in range(300):
        units = random.uniform(10, 1_000)
        fit.observe((1.0, units), 2 * (0.002 + 3e-6 * units))
    assert fit.predict((1.0, 500.0)) == pytest.approx(0.007, rel=0.15)


def test_coefficients_are_never_negative() -> None:
    fit, random = OnlineFit(2), Random(4)
    for _ in range(200):
        units = random.uniform(0, 1)
        fit.observe((1.0, units), 0.01 - 0.005 * units)
    assert min(fit.coefficients) >= 0.0


def test_one_kind_does_not_forget_what_another_has_shown() -> None:
    fit = OnlineFit(2, kind_count=2)
    for number in range(200):
        fit.observe((1.0, 100.0 + number), 0.002 + 3e-6 * (100 + number), 0)
    for _ in range(20_000):
        fit.observe((1.0, 0.0), 0.002, 1)
    assert fit.predict((1.0, 200.0)) == pytest.approx(0.0026, rel=0.02)
