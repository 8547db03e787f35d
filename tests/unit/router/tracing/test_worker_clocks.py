"""The difference between clocks, and the attributes of a root span about it."""

from __future__ import annotations

import pytest

from headrace_common.latency.clocks import ClockDifference, ClockOffset, ClockPair
from headrace_common.telemetry import schema
from headrace_router.tracing import worker_clocks
from headrace_router.tracing.worker_clocks import clock_attributes, difference_now


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


def test_the_error_of_a_difference_includes_that_of_reading_both_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ClockOffset()
    clock.add_exchange(1_000, 6_000, 6_000, 1_200)
    now = ClockPair(55_500, 5_500, 3_500)
    monkeypatch.setattr(worker_clocks, "clocks_now", lambda: now)
    assert difference_now(clock) == (clock.offset_ns - 50_000, clock.error_ns + 3_500)
