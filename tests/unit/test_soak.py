"""The definition of growth in a soak."""

from __future__ import annotations

from tests.chaos.soak import Sample, growth_of


def test_growth_during_the_warm_up_is_not_reported() -> None:
    samples = [Sample(100 + min(number, 20), 30, 9) for number in range(60)]
    assert growth_of("router-0", samples).violations == []


def test_series_that_keep_growing_are_named() -> None:
    samples = [Sample(100 + number, 30 + number, 9 + number) for number in range(60)]
    assert growth_of("router-0", samples).violations == [
        "router-0: 124 to 154 MiB",
        "router-0: 54 to 84 descriptors",
        "router-0: 34 to 64 threads",
    ]
