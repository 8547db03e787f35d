"""The difference between clocks, and the attributes of a root span about it."""

from __future__ import annotations

import time

import pytest

from headrace_common.latency.clock_offset import ClockOffset
from headrace_common.telemetry import schema
from headrace_router.tracing.worker_clocks import (
    ClockDifference,
    clock_attributes,
    difference_now,
)


def test_each_worker_has_its_offset_and_its_error_at_the_same_place() -> None:
    found = clock_attributes(
        {
            "prefill-0": ClockDifference(3_000_500_000, 200_000),
            "decode-1": ClockDifference(-1_500_000, 80_000),
        }
    )
    assert found == {
        schema.ATTRIBUTE_CLOCK_WORKER_IDS: ("prefill-0", "decode-1"),
        schema.ATTRIBUTE_CLOCK_WORKERS_AHEAD_MS: (3_000.5, -1.5),
        schema.ATTRIBUTE_CLOCK_WORKERS_ERROR_MS: (0.2, 0.08),
    }


def test_a_request_without_workers_has_none() -> None:
    assert clock_attributes({}) == {}


def test_a_pause_between_the_looks_at_the_clocks_is_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ClockOffset()
    clock.add_exchange(1_000, 6_000, 6_000, 1_200)
    looks = iter((2_000, 9_000))
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(looks))
    # This host's wall clock is 50,000 ns ahead, and the pause is before its look or after it.
    monkeypatch.setattr(time, "time_ns", lambda: 52_000)
    found = difference_now(clock)
    assert found.error_ns == clock.error_ns + 3_500
    assert abs(found.ahead_ns - (clock.offset_ns - 50_000)) <= 3_500
