"""Wakes the status streams of a worker that had nothing to report."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class StatusSignal:
    """The worker gives it when it begins something: a request, or its end. One event loop owns it."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    def notify(self) -> None:
        """The worker's status may change from now on."""
        self._begun.set()
        self._begun = asyncio.Event()

    async def wait_until(self, due_s: float) -> None:
        """Returns at the next `notify`, or at `due_s` of the event loop's clock."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await self._begun.wait()
