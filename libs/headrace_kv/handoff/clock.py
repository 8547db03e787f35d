"""Clocks and timers of the data plane, replaceable by virtual time in tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_common.process.kill_timer import boottime_s


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
