"""When the kernel is to end a process that writes too late."""

from __future__ import annotations

from typing import cast

import pytest

from headrace_common.process.kill_timer import KillTimer
from headrace_kv.leases import LateWriteGuard


class RecordedTimer:
    """Has the deadlines by owner."""

    def __init__(self) -> None:
        self.deadlines: dict[object, float] = {}

    def set(self, owner: object, deadline_s: float) -> None:
        self.deadlines[owner] = deadline_s

    def clear(self, owner: object) -> None:
        del self.deadlines[owner]


@pytest.fixture
def timer() -> RecordedTimer:
    return RecordedTimer()


def granted(
    timer: RecordedTimer, end_s: float = 100.0, quarantine_s: float = 15.0
) -> LateWriteGuard:
    """With a lease until `end_s`."""
    guard = LateWriteGuard(cast("KillTimer", timer))
    guard.lease_granted(end_s, quarantine_s)
    return guard


def test_a_write_may_go_on_for_half_the_quarantine_after_the_lease(timer: RecordedTimer) -> None:
    guard = granted(timer)
    assert not timer.deadlines
    guard.write_started()
    assert timer.deadlines == {guard: 107.5}
    guard.lease_granted(102.0, 15.0)
    assert timer.deadlines == {guard: 109.5}


def test_only_the_end_of_the_last_write_of_a_stream_ends_its_watch(timer: RecordedTimer) -> None:
    guard, other = granted(timer), granted(timer, 101.0)
    for one in (guard, guard, other):
        one.write_started()
    guard.write_ended()
    assert timer.deadlines == {guard: 107.5, other: 108.5}
    guard.write_ended()
    assert timer.deadlines == {other: 108.5}


def test_a_short_quarantine_cannot_end_a_process_that_runs(timer: RecordedTimer) -> None:
    """A transport takes up to two seconds after the lease to give up a write."""
    guard = granted(timer, quarantine_s=0.001)
    guard.write_started()
    assert timer.deadlines == {guard: 102.5}
