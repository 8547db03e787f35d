"""When the router tries to reach members of the registry that do not answer.

A member may be registered with an address at which nothing answers. Each try costs the router about 1.5 ms of CPU. So
members without any answer so far share one rate of retries, however many they are.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_AT_ONCE: Final = 64
_RETRIES_PER_S: Final = 20.0
# Without any answer so far, and after an answer.
_SILENT_DELAY_MAX_S: Final = 30.0
_DELAY_MAX_S: Final = 3.0


class RetryDelay:
    """The delays between the tries to reach one member. They double, and are drawn from the upper half."""

    def __init__(self, first_s: float, longest_s: float = _DELAY_MAX_S) -> None:
        """`longest_s` is for a member that has answered before."""
        self.failures = 0
        self.has_answered = False
        self._first_s = first_s
        self._longest_s = longest_s

    def answered(self) -> None:
        """The member has sent what was asked for."""
        self.failures, self.has_answered = 0, True

    def failed_s(self) -> float:
        """Counts a failure. Returns the seconds until the next try."""
        longest_s = self._longest_s if self.has_answered else _SILENT_DELAY_MAX_S
        delay_s = min(longest_s, self._first_s * 2.0 ** min(self.failures, 16))
        self.failures += 1
        return delay_s * random.uniform(0.5, 1.0)


class Dials:
    """Limits how many members without any answer so far are tried at once, and how often they are tried again.

    Members with fewer failures go first. Members that have answered need not wait. One event loop owns it.
    """

    def __init__(self, at_once: int = _AT_ONCE, retries_per_s: float = _RETRIES_PER_S) -> None:
        self._at_once = at_once
        self._interval_s = 1.0 / retries_per_s
        self._running = 0
        self._next_retry_s = 0.0
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, member: RetryDelay) -> AsyncIterator[None]:
        """Waits until the member may be tried. The block must end when it has answered or failed."""
        if member.has_answered:
            yield
            return
        waiter = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (member.failures, next(self._numbers), waiter))
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self._end_turn()
            raise
        try:
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        self._running -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._running < self._at_once:
            failures, _, waiter = self._waiting[0]
            if not waiter.done():
                if failures and self._must_wait():
                    return
                self._running += 1
                waiter.set_result(None)
            heapq.heappop(self._waiting)

    def _must_wait(self) -> bool:
        """Whether the next retry is too early. It is granted later in that case."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if now_s >= self._next_retry_s:
            self._next_retry_s = now_s + self._interval_s
            return False
        if self._timer is None:
            self._timer = loop.call_at(self._next_retry_s, self._retry)
        return True

    def _retry(self) -> None:
        self._timer = None
        self._grant()
