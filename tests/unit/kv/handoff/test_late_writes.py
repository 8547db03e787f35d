"""When the kernel is to end a process that writes too late."""

from __future__ import annotations

from typing import cast

from headrace_common.process.kill_timer import KillTimer
from headrace_kv.leases import LateWriteGuard

QUARANTINE_S = 15.0


class RecordedTimer:
    """Has the deadlines by owner."""

    def __init__(self) -> None:
        self.deadlines: dict[object, float] = {}

    def set(self, owner: object, deadline_s: float) -> None:
        self.deadlines[owner] = deadline_s

    def clear(self, owner: object) -> None:
        del self.deadlines[owner]


def guard_with(timer: RecordedTimer) -> LateWriteGuard:
    return LateWriteGuard(cast("KillTimer", timer))


def test_the_process_may_live_for_half_the_quarantine_after_the_lease() -> None:
    timer = RecordedTimer()
    guard = guard_with(timer)
    guard.lease_granted(100.0, QUARANTINE_S)
    assert not timer.deadlines
    guard.write_started()
    assert timer.deadlines == {guard: 107.5}


def test_a_renewal_moves_the_end_of_a_write_in_flight() -> None:
    timer = RecordedTimer()
    guard = guard_with(timer)
    guard.lease_granted(100.0, QUARANTINE_S)
    guard.write_started()
    guard.lease_granted(102.0, QUARANTINE_S)
    assert timer.deadlines == {guard: 109.5}


def test_only_the_end_of_the_last_write_ends_the_watch() -> None:
    timer = RecordedTimer()
    guard = guard_with(timer)
    guard.lease_granted(100.0, QUARANTINE_S)
    guard.write_started()
    guard.write_started()
    guard.write_ended()
    assert timer.deadlines
    guard.write_ended()
    assert not timer.deadlines


def test_streams_are_watched_apart() -> None:
    timer = RecordedTimer()
    guards = [guard_with(timer), guard_with(timer)]
    for number, guard in enumerate(guards):
        guard.lease_granted(100.0 + number, QUARANTINE_S)
        guard.write_started()
    guards[0].write_ended()
    assert timer.deadlines == {guards[1]: 108.5}


def test_a_short_quarantine_cannot_end_a_process_that_runs() -> None:
    """A transport takes up to two seconds after the lease to give up a write."""
    timer = RecordedTimer()
    guard = guard_with(timer)
    guard.lease_granted(100.0, 0.001)
    guard.write_started()
    assert timer.deadlines == {guard: 102.5}
