"""What the engine holds, as its scheduler knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from headrace_engine.vllm.link.messages import EngineLoad

REPORT_S: Final = 0.05


class LoadMeter:
    """Follows requests through the scheduler's hooks, on its thread; `read` may be called on any.

    Blocks are counted where vLLM does, by `count_blocks`: (used, total).
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._running: set[str] = set()
        self._count_blocks: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def bind(self, count_blocks: Callable[[], tuple[int, int]]) -> None:
        """Blocks can be counted from now on."""
        self._count_blocks = count_blocks

    def added(self, request_id: str) -> None:
        """A request has come."""
        self._known.add(request_id)

    def stepped(self, scheduled: Iterable[str], preempted: Iterable[str]) -> None:
        """A step was planned: who takes part, and who gave its blocks up before; one may do both."""
        self._running.difference_update(preempted)
        self._running.update(scheduled)

    def finished(self, request_id: str) -> None:
        """A request has ended, in whatever state."""
        self._known.discard(request_id)
        self._running.discard(request_id)

    def read(self) -> EngineLoad:
        """Now."""
        used, total = self._count_blocks()
        running = len(self._running)
        return EngineLoad(running, max(0, len(self._known) - running), used, total)


async def report_changes(meter: LoadMeter, send: Callable[[EngineLoad], None]) -> None:
    """Sends the load and then every change, looked for every `REPORT_S`: no hook follows the last block's return."""
    last: EngineLoad | None = None
    while True:
        load = meter.read()
        if load != last:
            send(load)
            last = load
        await asyncio.sleep(REPORT_S)
