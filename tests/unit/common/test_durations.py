"""Conversion of durations and timestamps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_common.durations import (
    duration_from_ns,
    duration_from_seconds,
    seconds_from_duration,
    timestamp_from_unix_ns,
    timestamp_from_unix_s,
)


@given(st.integers(0, 10**15))
def test_durations_keep_nanoseconds(nanoseconds: int) -> None:
    duration = duration_from_ns(nanoseconds)
    assert duration.ToNanoseconds() == nanoseconds
    assert seconds_from_duration(duration) == nanoseconds / 1e9


def test_negative_durations_become_zero() -> None:
    assert duration_from_ns(-1) == duration_from_seconds(-0.5) == duration_from_ns(0)


def test_seconds_are_rounded_to_nanoseconds() -> None:
    assert duration_from_seconds(1.25e-9).ToNanoseconds() == 1
    assert timestamp_from_unix_s(1.5) == timestamp_from_unix_ns(1_500_000_000)
