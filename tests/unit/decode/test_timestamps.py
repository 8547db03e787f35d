"""The times of an attempt, while the wall clock is set."""

from __future__ import annotations

import time

import pytest

from headrace.decode.v1 import decode_pb2
from headrace_common.latency.clocks import ClockPair
from headrace_decode.timestamps import RequestTimestamps


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_wall_clock_that_is_set_changes_no_duration(
    monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    times = RequestTimestamps()
    set_ns = times.start_unix_ns + step_s * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: set_ns)
    times.blocks_reserved()
    times.ended()
    assert 0 <= times.reserved_unix_ns - times.start_unix_ns < 600 * 10**9
    assert times.end_unix_ns >= times.reserved_unix_ns


def test_the_times_are_durations_since_the_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 5_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    times = RequestTimestamps(ClockPair(10**18, 5_000_000, 0))
    times.blocks_reserved()
    now_ns = 9_000_000
    times.kv_arrived()
    times.tokens_generated(sampled=False, from_kv=True, step_start_ns=8_000_000)
    now_ns = 12_000_000
    times.tokens_generated(sampled=False, from_kv=True, step_start_ns=11_000_000)
    assert times.to_proto() == decode_pb2.AttemptTimes(
        received_unix_ns=10**18,
        reserved_us=1,
        kv_arrived_us=4_000,
        step_start_us=3_000,
        first_token_us=4_000,
    )
