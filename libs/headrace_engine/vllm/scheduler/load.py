"""The load of an engine, as its scheduler sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from headrace_engine.vllm.link.messages import EngineLoad

REPORT_S: Final = 0.05


class LoadMeter:
    """Counts requests from the scheduler's hooks, on the scheduling thread. Any thread may call `read`."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._running: set[str] = set()
        self._count_blocks: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def bind(self, count_blocks: Callable[[], tuple[int, int]]) -> None:
        """`count_blocks` reads vLLM's (used, total) blocks."""
        self._count_blocks = count_blocks

    def request_added(self, request_id: str) -> None:
        """The scheduler has a new request."""
        self._known.add(request_id)

    def step_planned(self, scheduled: Iterable[str], preempted: Iterable[str]) -> None:
        """A step contains the `scheduled` requests. One of them may have been preempted before."""
        self._running.difference_update(preempted)
        self._running.update(scheduled)

    def request_finished(self, request_id: str) -> None:
        """A request has ended, in whatever state."""
        self._known.discard(request_id)
        self._running.discard(request_id)

    def read(self) -> EngineLoad:
        """The current load."""
        used, total = self._count_blocks()
        running = len(self._running)
        return EngineLoad(running, max(0, len(self._known) - running), used, total)


async def report_changes(meter: LoadMeter, send: Callable[[EngineLoad], None]) -> None:
    """Sends the load at the start and after each change. Polls every `REPORT_S`: no hook follows a block's return."""
    last: EngineLoad | None = None
    while True:
        load = meter.read()
        if load != last:
            send(load)
            last = load
        await asyncio.sleep(REPORT_S)
