"""Time as the data plane's two sides ask for it, so that a model of them can have its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Clock:
    """`monotonic_s` measures, `unix_s` compares with what other hosts say."""

    monotonic_s: Callable[[], float] = time.monotonic
    unix_s: Callable[[], float] = time.time


class TimerHandle(Protocol):
    """A call that is to come."""

    def cancel(self) -> None:
        """It comes no more."""


class Timers(Protocol):
    """What is used of an event loop to wait; every asyncio loop is one."""

    def time(self) -> float:
        """Seconds of a monotonic clock."""

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Calls back after some seconds."""


def running_timers(timers: Timers | None) -> Timers:
    """`timers`, or the running event loop's."""
    return timers if timers is not None else asyncio.get_running_loop()
