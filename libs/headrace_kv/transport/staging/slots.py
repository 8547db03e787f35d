"""Counts out the equal parts of a buffer."""

from __future__ import annotations

import threading
import time

from headrace_common.errors import TransferFailed


class Slots:
    """Slots 0 to `count` - 1. Any thread may call its methods."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._free = list(range(count))
        self._fault = ""

    def acquire(self, deadline_s: float) -> int:
        """Waits for a free slot. Raises TransferFailed at the deadline, by time.monotonic, or once closed."""
        with self._changed:
            while not self._free and not self._fault:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0.0:
                    raise TransferFailed("no staging or landing slot became free in time")
                self._changed.wait(remaining_s)
            if self._fault:
                raise TransferFailed(self._fault)
            # The slot that was used last is likeliest to be in a CPU cache.
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Makes a slot free."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def close(self, fault: str) -> None:
        """Fails every present and later `acquire`."""
        with self._changed:
            self._fault = fault
            self._changed.notify_all()
