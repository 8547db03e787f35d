"""How long each model has had no reachable decode worker, and requests that wait for one."""

from __future__ import annotations

import asyncio
import contextlib
import time

from headrace_common.deadlines import Deadline


class WorkerAvailability:
    """Tracks which models have a reachable decode worker. Owned by one event loop.

    A router that has just started has no workers yet. Workers that the registry has lost register again within
    seconds. So a request waits while its model has been unavailable for less than `grace_s`, and never after that.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._available: set[str] = set()
        # By model. A model that was never available counts as unavailable since the start.
        self._unavailable_since_s: dict[str, float] = {}
        self._start_s = time.monotonic()
        self._changed = asyncio.Event()

    def start(self) -> None:
        """The registry's first view has arrived: the grace of models that were never available begins now."""
        self._start_s = time.monotonic()

    def update(self, model: str, available: bool) -> None:
        """Sets whether a decode worker of `model` is reachable now."""
        if available == (model in self._available):
            return
        now_s = time.monotonic()
        if available:
            self._available.add(model)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            return
        self._available.discard(model)
        self._unavailable_since_s[model] = now_s
        # An entry past its grace has the same effect as the start time.
        self._unavailable_since_s = {
            name: since_s
            for name, since_s in self._unavailable_since_s.items()
            if now_s - since_s < self._grace_s
        }

    async def wait(self, model: str, deadline: Deadline) -> bool:
        """Waits until `model` is available, or its grace or the deadline is over. Returns whether it had to wait."""
        waited = False
        while model not in self._available:
            since_s = self._unavailable_since_s.get(model, self._start_s)
            left_s = min(since_s + self._grace_s - time.monotonic(), deadline.remaining_s())
            if left_s <= 0:
                break
            waited = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
        return waited
