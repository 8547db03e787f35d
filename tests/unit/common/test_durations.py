"""Conversion of durations and timestamps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_common.durations import (
    duration_from_ns,
    duration_from_seconds,
    ns_from_duration,
    seconds_from_duration,
    timestamp_from_unix_ns,
    unix_ns_from_timestamp,
    unix_s_from_timestamp,
)


@given(st.integers(0, 10**15))
def test_durations_keep_nanoseconds(nanoseconds: int) -> None:
    duration = duration_from_ns(nanoseconds)
    assert ns_from_duration(duration) == duration.ToNanoseconds() == nanoseconds
    assert seconds_from_duration(duration) == nanoseconds / 10**9


@given(st.floats(allow_nan=False))
def test_seconds_that_no_duration_has_become_the_nearest_one(seconds: float) -> None:
    converted = seconds_from_duration(duration_from_seconds(seconds))
    assert abs(converted - min(max(0.0, seconds), 315_576_000_000)) <= 1e-9 * converted + 1e-9


@given(st.integers(0, 2 * 10**18))
def test_timestamps_keep_nanoseconds(unix_ns: int) -> None:
    timestamp = timestamp_from_unix_ns(unix_ns)
    assert unix_ns_from_timestamp(timestamp) == timestamp.ToNanoseconds() == unix_ns
    assert unix_s_from_timestamp(timestamp) == unix_ns / 10**9
