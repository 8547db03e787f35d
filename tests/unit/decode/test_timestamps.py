"""The times of an attempt, while the wall clock is set."""

from __future__ import annotations

import time

import pytest

from headrace_decode.timestamps import RequestTimestamps


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_wall_clock_that_is_set_changes_no_duration(
    monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    times = RequestTimestamps()
    set_ns = times.start.unix_ns + step_s * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: set_ns)
    times.blocks_reserved()
    times.ended()
    assert 0 < times.steps.reserved_us <= times.end_us < 600 * 10**6
