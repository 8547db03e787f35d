"""The attributes of a root span about its workers' clocks."""

from __future__ import annotations

from headrace_common.telemetry import schema
from headrace_router.tracing.worker_clocks import ClockDifference, clock_attributes


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
