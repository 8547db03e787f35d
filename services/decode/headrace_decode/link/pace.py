"""When a link sends the tokens that may wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class TokenPace:
    """Lets tokens go at most once in the interval that the router asks for."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        """`on_due` is called when tokens that have waited may go."""
        self._on_due = on_due
        self._interval_s = 0.0
        self._due_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set_interval(self, interval_s: float) -> None:
        """Changes the interval, also for tokens that wait now."""
        if interval_s == self._interval_s:
            return
        self._due_s += interval_s - self._interval_s
        self._interval_s = interval_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._on_due()

    def try_release(self) -> bool:
        """Whether the tokens that wait may go now. If not, `on_due` will be called."""
        if self._timer is not None:
            return False
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if now_s < self._due_s:
            self._timer = loop.call_at(self._due_s, self._end_wait)
            return False
        self._due_s = now_s + self._interval_s
        return True

    def close(self) -> None:
        """Calls `on_due` no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_wait(self) -> None:
        self._timer = None
        # The timer may be early by less than the resolution of the loop's clock.
        self._due_s = -math.inf
        self._on_due()
