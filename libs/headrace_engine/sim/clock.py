"""The time of simulated computing."""

from __future__ import annotations

import asyncio


class SimClock:
    """The time of the running event loop in seconds. A test may give an engine a clock that it advances itself."""

    def now_s(self) -> float:
        """The current time."""
        return asyncio.get_running_loop().time()

    async def sleep_until(self, due_s: float) -> None:
        """Returns when the time is `due_s` or later. Always lets other tasks run."""
        await asyncio.sleep(max(0.0, due_s - self.now_s()))

    async def wait(self, event: asyncio.Event) -> None:
        """Waits for an event that does not depend on this clock."""
        await event.wait()
