"""Time that passes only when the model advances it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace_common.deadlines import Deadline


class VirtualHandle:
    """A scheduled call."""

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.callback = callback
        self.arguments = arguments
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class VirtualTimers:
    """See headrace_kv.leases.Timers; also the senders' clock."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self._calls: list[tuple[float, int, VirtualHandle]] = []
        self._number = itertools.count()

    def time(self) -> float:
        return self.now_s

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any
    ) -> VirtualHandle:
        handle = VirtualHandle(callback, args)
        due_s = self.now_s + max(0.0, delay)
        heapq.heappush(self._calls, (due_s, next(self._number), handle))
        return handle

    def next_s(self) -> float:
        """When the next call is due; infinity without calls."""
        while self._calls and self._calls[0][2].cancelled:
            heapq.heappop(self._calls)
        return self._calls[0][0] if self._calls else float("inf")

    def advance_to(self, now_s: float) -> None:
        """Makes every call that is due by then, in order."""
        while self.next_s() <= now_s:
            due_s, _, handle = heapq.heappop(self._calls)
            self.now_s = max(self.now_s, due_s)
            handle.callback(*handle.arguments)
        self.now_s = max(self.now_s, now_s)

    def pending(self) -> tuple[float, ...]:
        """Seconds until each call, rounded so that equal states compare equal."""
        return tuple(
            sorted(
                round(due_s - self.now_s, 3)
                for due_s, _, handle in self._calls
                if not handle.cancelled
            )
        )


@dataclass(frozen=True, slots=True)
class VirtualDeadline(Deadline):
    """A deadline by virtual time."""

    timers: VirtualTimers

    def remaining_s(self) -> float:
        return max(0.0, self.monotonic_s - self.timers.time())

    @property
    def expired(self) -> bool:
        return self.timers.time() >= self.monotonic_s
