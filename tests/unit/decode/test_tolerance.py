"""The tolerance of a pair of workers: what it learns, and which layer and head it names."""

from __future__ import annotations

import math

import pytest

from headrace_decode.canary import LEARNED_COMPARISONS, Difference, PairTolerance


def errors(*layers: tuple[float, ...]) -> dict[tuple[int, int], float]:
    return {
        (layer, head): error
        for layer, heads in enumerate(layers)
        for head, error in enumerate(heads)
    }


def learned(dtype: str, *layers: tuple[float, ...]) -> PairTolerance:
    tolerance = PairTolerance(dtype)
    for _ in range(LEARNED_COMPARISONS):
        assert not tolerance.learned
        tolerance.learn(errors(*layers))
    assert tolerance.learned
    return tolerance


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        ("float32", 0.02),
        ("float16", 0.1),
        ("bfloat16", 0.15),
        ("uint8", 0.25),
        ("float8_e4m3fn", 0.25),
    ],
)
def test_before_it_has_learned_the_bound_of_the_type_holds(dtype: str, most: float) -> None:
    tolerance = PairTolerance(dtype)
    assert tolerance.difference(errors((most, 0.0))) is None
    assert tolerance.difference(errors((0.0, 1.01 * most))) == Difference(0, 1, 1.01 * most, most)


def test_each_layer_has_its_own_tolerance() -> None:
    tolerance = learned("bfloat16", (0.02, 0.01), (0.02, 0.03))
    assert tolerance.difference(errors((0.079, 0.079), (0.119, 0.119))) is None
    found = tolerance.difference(errors((0.0, 0.0), (0.13, 0.0)))
    assert found == Difference(1, 0, 0.13, 4.0 * 0.03)
    assert str(found) == "layer 1, head 0 differ by 0.13, more than 0.12"
    # No honest difference is too small to be learned, and none widens the bound of the type.
    assert learned("bfloat16", (0.0,)).difference(errors((0.05,))) is None
    assert learned("bfloat16", (0.0,)).difference(errors((0.051,))) is not None
    assert learned("bfloat16", (0.14,)).difference(errors((0.16,))) is not None


def test_it_names_the_first_layer_and_the_head_that_differs_most_there() -> None:
    tolerance = learned("float32", (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    found = tolerance.difference(errors((0.0, 0.0), (0.3, 0.7), (1.4, 1.4)))
    assert found is not None
    assert (found.layer, found.head, found.error) == (1, 1, 0.7)
    broken = tolerance.difference(errors((0.0, math.inf), (1.4, 1.4)))
    assert broken is not None
    assert (broken.layer, broken.head) == (0, 1)


def test_later_comparisons_change_nothing() -> None:
    tolerance = learned("bfloat16", (0.02,))
    tolerance.learn(errors((0.07,)))
    assert tolerance.difference(errors((0.09,))) is not None


def test_a_layer_that_was_not_learned_has_the_bound_of_the_type() -> None:
    tolerance = learned("bfloat16", (0.0,))
    assert tolerance.difference({(5, 0): 0.15}) is None
    assert tolerance.difference({(5, 0): 0.16}) is not None
