"""Leases of KV memory, the clock that they run by, and the writes that may end after them.

A renewal carries the time at which decode sent it, by decode's clock. It extends the lease from that time, however late
the sender reads it. The fastest message so far relates the two clocks. The first message, the Welcome, is read within
one time to live or not at all. So a lease ends at most two times to live after decode's last renewal. The receiver
waits that long before it reuses blocks (I1).

A write that has begun goes on when the process is frozen and woken, and nothing in the process can prevent that. So
the kernel ends the process (KillTimer) when writes of a stream are in flight for too long after the stream's lease.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_common.limits import write_quiet_s
from headrace_common.process.kill_timer import KillTimer, boottime_s


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of a monotonic clock, by which deadlines and durations count, and of the clock of write leases.

    Leases also run out while the machine is suspended.
    """

    monotonic_s: Callable[[], float] = time.monotonic
    lease_s: Callable[[], float] = boottime_s


class TimerHandle(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """The call is not made."""


class Timers(Protocol):
    """The timer methods of an event loop. Every asyncio loop has them."""

    def time(self) -> float:
        """Seconds of a monotonic clock."""

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Calls `callback` after `delay` seconds."""


def running_timers(timers: Timers | None) -> Timers:
    """`timers`, or the running event loop's."""
    return timers if timers is not None else asyncio.get_running_loop()


class WriteLease:
    """The sender's permission to write, renewed by messages of one stream.

    The sender's thread reads it and the stream's event loop renews it. Only one number is
    shared, so no lock is needed.
    """

    def __init__(self, hello_s: float, welcome_s: float, ttl_s: float) -> None:
        """Times are by the sender's clock: it sent Hello at `hello_s` and read Welcome at `welcome_s`."""
        self._expires_s = hello_s + ttl_s
        # When decode sent Welcome, plus the shortest time that a message has taken so far.
        self._origin_s = welcome_s

    @classmethod
    def none(cls) -> WriteLease:
        """A lease that was never granted."""
        return cls(float("-inf"), float("-inf"), 0.0)

    def renew(self, now_s: float, sent_s: float, ttl_s: float) -> bool:
        """Extends the lease to `ttl_s` after decode sent the renewal, which was `sent_s` after its Welcome.

        False when the lease had run out. It stays expired.
        """
        if not self.alive(now_s):
            return False
        self._origin_s = min(self._origin_s, now_s - sent_s)
        self._expires_s = max(self._expires_s, self._origin_s + sent_s + ttl_s)
        return True

    def revoke(self) -> None:
        """Ends the lease at once."""
        self._expires_s = float("-inf")

    @property
    def end_s(self) -> float:
        """When the lease ends, unless it is renewed."""
        return self._expires_s

    def alive(self, now_s: float) -> bool:
        """Whether a write may start now."""
        return now_s < self._expires_s

    def remaining_s(self, now_s: float) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._expires_s - now_s)


@dataclass(frozen=True, slots=True)
class QuarantinePolicy:
    """How long the blocks of a stream's transfers must not be reused after the stream has ended.

    `transport_s` must be longer than a write may last, see KvTransport.quiet_after_failure_s.
    """

    lease_ttl_s: float
    transport_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the end of the stream until no write can land."""
        return write_quiet_s(self.lease_ttl_s, self.transport_s)

    @property
    def tick_s(self) -> float:
        """Interval at which to call Quarantine.advance."""
        return min(0.25, max(0.005, self.total_s / 20))


class Quarantine:
    """Counts the time since a stream ended.

    A gap between two calls of `advance` counts as four ticks at most. While this process was stopped, bytes that wait
    in its sockets did not land either.
    """

    def __init__(self, policy: QuarantinePolicy, now_s: float) -> None:
        self._remaining_s = policy.total_s
        self._step_max_s = 4 * policy.tick_s
        self._last_s = now_s

    def advance(self, now_s: float) -> bool:
        """True once the quarantine is over."""
        self._remaining_s -= min(max(0.0, now_s - self._last_s), self._step_max_s)
        self._last_s = now_s
        return self._remaining_s <= 0


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
        self.in_flight = 0
        """Writes that have started and not ended."""

    @staticmethod
    def allowed_s(quarantine_s: float) -> float:
        """How long after its lease a write may be in flight."""
        return max(_ALLOWED_MIN_S, _KILL_SHARE * quarantine_s)

    def lease_granted(self, end_s: float, quarantine_s: float) -> None:
        """The lease ends at `end_s` of `boottime_s`. Decode's quarantine goes on for `quarantine_s` after that."""
        with self._lock:
            self._deadline_s = end_s + self.allowed_s(quarantine_s)
            if self.in_flight and self._timer is not None:
                self._timer.set(self, self._deadline_s)

    def write_started(self) -> None:
        """Call it before the transport gets the write."""
        with self._lock:
            self.in_flight += 1
            if self.in_flight == 1 and self._timer is not None:
                self._timer.set(self, self._deadline_s)

    def write_ended(self) -> None:
        """The transport has ended the write, successfully or not."""
        with self._lock:
            self.in_flight -= 1
            if not self.in_flight and self._timer is not None:
                self._timer.clear(self)
