"""Where simulated requests wait for a decode worker: for a slot by fair share, then for blocks by class."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from headrace_common.callers.priority import Priority
from headrace_frontend.admission.fair_share import CapacityRequest, FairPool, Grant

_TENANT: Final = ""
_T = TypeVar("_T")


class DecodeSlots:
    """The slots of all decode workers, in the pool that a router has for them."""

    def __init__(self) -> None:
        self._pool = FairPool(1, dict, queue_above_share=True)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._pool.waiting

    def resize(self, slots: int) -> None:
        """The decode workers have so many slots now."""
        self._pool.resize(max(1, slots))

    @asynccontextmanager
    async def holding(self, priority: Priority) -> AsyncIterator[None]:
        """A slot over the block, after a wait for it."""
        granted = asyncio.Event()
        grant = self._pool.acquire(CapacityRequest(_TENANT, 1, granted.set, priority))
        if grant is Grant.WAITING:
            await granted.wait()
        try:
            yield
        finally:
            self._pool.release(_TENANT, 1, priority)


class RoomQueue:
    """Requests with a slot that no decode worker has blocks for. In each class, the oldest is first.

    The first of every class may try. Admission of the decode workers decides between classes.
    """

    def __init__(self) -> None:
        self._waiting: dict[Priority, deque[asyncio.Future[None]]] = {
            priority: deque() for priority in Priority
        }

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._waiting.values()))

    async def first(self, priority: Priority, attempt: Callable[[], _T | None]) -> _T:
        """What `attempt` returns, once it is not None. It is called whenever it may succeed."""
        try:
            return await self._first(priority, attempt)
        finally:
            # One release may have made room for several requests.
            self.wake()

    def wake(self) -> None:
        """Lets the oldest request of each class try again."""
        for waiting in self._waiting.values():
            while waiting:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break

    async def _first(self, priority: Priority, attempt: Callable[[], _T | None]) -> _T:
        waiting = self._waiting[priority]
        is_first = not waiting
        while True:
            if is_first:
                result = attempt()
                if result is not None:
                    return result
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if is_first:
                # It has waited longest.
                waiting.appendleft(turn)
            else:
                waiting.append(turn)
            await turn
            is_first = True
