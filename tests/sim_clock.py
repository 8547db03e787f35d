"""A clock by which a test advances the computing of sim engines."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Any

from headrace_engine.sim.stepper import SimClock

# A task that a step wakes may need a few turns of the event loop to wake another one.
_SETTLE_TURNS = 8
# Due times are sums of fractions of a step.
_ROUNDING_S = 1e-9


class ManualClock(SimClock):
    """Stands still but for `advance`, which runs exactly the simulated steps that end in that time.

    Only simulated computing takes its time from the clock. Transfers, deadlines and time stamps are
    real, so a test still waits for the events that depend on them.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None], asyncio.Task[Any]]] = []
        # Tasks that a due time or an event woke, and that have not begun to wait again.
        self._running: set[asyncio.Task[Any]] = set()

    def now_s(self) -> float:
        return self._now_s

    async def sleep_until(self, due_s: float) -> None:
        if due_s <= self._now_s:
            await asyncio.sleep(0)
            return
        task = _current_task()
        wakeup = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (due_s, next(self._order), wakeup, task))
        self._running.discard(task)
        await wakeup

    async def wait(self, event: asyncio.Event) -> None:
        task = _current_task()
        self._running.discard(task)
        await event.wait()
        self._running.add(task)

    async def advance(self, seconds: float) -> None:
        """Moves the time on, from one due time to the next, and returns when all step loops wait again."""
        target_s = self._now_s + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= target_s + _ROUNDING_S:
            due_s, _, wakeup, task = heapq.heappop(self._sleepers)
            if wakeup.done():
                continue
            self._now_s = max(self._now_s, due_s)
            self._running.add(task)
            wakeup.set_result(None)
            await self._settle()
        self._now_s = target_s

    async def _settle(self) -> None:
        """Returns when every task that uses the clock waits."""
        while True:
            for _ in range(_SETTLE_TURNS):
                await asyncio.sleep(0)
            self._running = {task for task in self._running if not task.done()}
            if not self._running:
                return


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
