"""Lets callers begin expensive work in turns, so that many requests of one delay no request of another for long."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable


class FairTurns:
    """One turn for each waiting caller in each iteration of the event loop, which owns this.

    A turn lasts until the caller's work waits for something, so nothing must be released. While `alone` returns true,
    no turn is waited for.
    """

    def __init__(self, alone: Callable[[], bool]) -> None:
        self._alone = alone
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._had_turn: set[str] = set()
        """The callers with a turn in this iteration."""
        self._next: asyncio.Handle | None = None

    @property
    def waiting(self) -> int:
        """Turns that are waited for."""
        return sum(len(turns) for turns in self._waiting.values())

    async def wait(self, caller: str) -> None:
        """Returns at the caller's turn."""
        if self._alone() and not self._waiting:
            return
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.call_soon(self._begin_iteration)
        if caller not in self._waiting and caller not in self._had_turn:
            self._had_turn.add(caller)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        await turn

    def _begin_iteration(self) -> None:
        self._had_turn.clear()
        for caller in tuple(self._waiting):
            turns = self._waiting[caller]
            while turns and turns[0].done():
                # Its request was cancelled.
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
                self._had_turn.add(caller)
            if not turns:
                del self._waiting[caller]
        again = self._waiting or self._had_turn
        loop = asyncio.get_running_loop()
        self._next = loop.call_soon(self._begin_iteration) if again else None
