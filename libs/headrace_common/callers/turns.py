"""Lets callers begin expensive work in turns, so that many requests of one delay no request of another for long."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple


class _Turn(NamedTuple):
    task: asyncio.Task[object]
    given: asyncio.Future[None]


class FairTurns:
    """One turn for each waiting caller in each iteration of the event loop, which owns this.

    A turn lasts until the task waits for something, so nothing must be released. While `alone` returns true, no turn is
    waited for.
    """

    def __init__(self, alone: Callable[[], bool]) -> None:
        self._alone = alone
        self._waiting: OrderedDict[str, deque[_Turn]] = OrderedDict()
        self._task_of: dict[str, asyncio.Task[object]] = {}
        """The task of each caller with a turn in this iteration."""
        self._next: asyncio.Handle | None = None

    @property
    def waiting(self) -> int:
        """Turns that are waited for."""
        return sum(len(turns) for turns in self._waiting.values())

    async def wait(self, caller: str) -> None:
        """Returns at a turn of the caller for the current task. At once while it has one."""
        if self._alone() and not self._waiting:
            return
        task = asyncio.current_task()
        assert task is not None, "turns are for tasks"
        if self._task_of.get(caller) is task:
            return
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.call_soon(self._begin_iteration)
        if caller not in self._waiting and caller not in self._task_of:
            self._task_of[caller] = task
            return
        turn = _Turn(task, loop.create_future())
        self._waiting.setdefault(caller, deque()).append(turn)
        await turn.given

    def _begin_iteration(self) -> None:
        self._task_of.clear()
        for caller in tuple(self._waiting):
            turns = self._waiting[caller]
            while turns and turns[0].given.done():
                # Its request was cancelled.
                turns.popleft()
            if turns:
                turn = turns.popleft()
                turn.given.set_result(None)
                self._task_of[caller] = turn.task
            if not turns:
                del self._waiting[caller]
        again = self._waiting or self._task_of
        loop = asyncio.get_running_loop()
        self._next = loop.call_soon(self._begin_iteration) if again else None


class OneEach:
    """Lets one task of each caller into a block at a time, in the order of their calls."""

    def __init__(self) -> None:
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}
        """The lock of each caller with tasks here, and their number."""

    @asynccontextmanager
    async def of(self, caller: str) -> AsyncIterator[None]:
        """A block that other tasks of the caller wait for."""
        lock, users = self._turns.get(caller, (asyncio.Lock(), 0))
        self._turns[caller] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            _, users = self._turns[caller]
            if users > 1:
                self._turns[caller] = (lock, users - 1)
            else:
                del self._turns[caller]
