"""Ends the process before one of its writes can be later than decode's quarantine allows (I1).

A write that has begun goes on when the process is frozen and woken, and nothing in the process can prevent that. So
the kernel ends the process (KillTimer) when writes of a stream are in flight for too long after the stream's lease.
"""

from __future__ import annotations

import threading

from headrace_common.process.kill_timer import KillTimer

_KILL_SHARE = 0.5
"""Part of the quarantine's transport time after which the process ends. In the rest, sent bytes land or are lost."""
_ALLOWED_MIN_S = 2.5
"""No transport that runs needs longer to give up a write. So a decode worker cannot end a process that runs."""


class LateWriteGuard:
    """Counts the writes in flight of one handoff stream. Any thread may call its methods.

    Without a timer it only counts.
    """

    def __init__(self, timer: KillTimer | None) -> None:
        self._timer = timer
        self._lock = threading.Lock()
        self._deadline_s = 0.0
        self._in_flight = 0

    @staticmethod
    def allowed_s(quarantine_s: float) -> float:
        """How long after its lease a write may be in flight."""
        return max(_ALLOWED_MIN_S, _KILL_SHARE * quarantine_s)

    @property
    def in_flight(self) -> int:
        """Writes that have started and not ended."""
        return self._in_flight

    def lease_granted(self, end_s: float, quarantine_s: float) -> None:
        """The lease ends at `end_s` of `boottime_s`. Decode's quarantine goes on for `quarantine_s` after that."""
        with self._lock:
            self._deadline_s = end_s + self.allowed_s(quarantine_s)
            if self._in_flight and self._timer is not None:
                self._timer.set(self, self._deadline_s)

    def write_started(self) -> None:
        """Call it before the transport gets the write."""
        with self._lock:
            self._in_flight += 1
            if self._in_flight == 1 and self._timer is not None:
                self._timer.set(self, self._deadline_s)

    def write_ended(self) -> None:
        """The transport has ended the write, successfully or not."""
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight and self._timer is not None:
                self._timer.clear(self)
