"""Measures how late the event loop of a test runs on a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

_TICK_S = 0.01


@dataclass(slots=True)
class LoopLag:
    """Time in which the event loop did not run, or ran other tasks only.

    `total_s` is the sum since the start. A test that measures a duration takes the difference.
    """

    total_s: float = 0.0


@asynccontextmanager
async def measured_loop_lag() -> AsyncIterator[LoopLag]:
    """Measures the lag until the body ends."""
    lag = LoopLag()
    heartbeat = asyncio.create_task(_beat(lag))
    try:
        yield lag
    finally:
        heartbeat.cancel()
        await asyncio.gather(heartbeat, return_exceptions=True)


async def _beat(lag: LoopLag) -> None:
    while True:
        slept_s = time.monotonic()
        await asyncio.sleep(_TICK_S)
        lag.total_s += max(0.0, time.monotonic() - slept_s - 2 * _TICK_S)
