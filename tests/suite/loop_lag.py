"""Measures how late the event loop of a test runs on a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_TICK_S = 0.01


@dataclass(slots=True)
class LoopLag:
    """The times in which the event loop did not run the heartbeat. Uses `time.monotonic`."""

    _slept_s: float = field(default_factory=time.monotonic)
    _stalls: list[tuple[float, float]] = field(default_factory=list)

    def since(self, start_s: float) -> float:
        """The sum of lateness since `start_s`, in seconds, with that of a heartbeat that is due now."""
        stalls = [*self._stalls, (self._slept_s, time.monotonic())]
        return sum(
            max(0.0, min(end_s - slept_s - 2 * _TICK_S, end_s - start_s))
            for slept_s, end_s in stalls
        )

    async def measure(self) -> None:
        """Sleeps for one tick after another and records those that took too long. Never returns."""
        while True:
            self._slept_s = time.monotonic()
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            if now_s - self._slept_s > 2 * _TICK_S:
                self._stalls.append((self._slept_s, now_s))


@asynccontextmanager
async def measured_loop_lag() -> AsyncIterator[LoopLag]:
    """Measures the lag until the body ends."""
    lag = LoopLag()
    heartbeat = asyncio.create_task(lag.measure())
    try:
        yield lag
    finally:
        heartbeat.cancel()
        await asyncio.gather(heartbeat, return_exceptions=True)
