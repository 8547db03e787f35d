"""Whether a model has a decode worker that answers, and how long requests wait when it has none."""

from __future__ import annotations

import asyncio
import contextlib
import time

from headrace_common.deadlines import Deadline


class WorkerAvailability:
    """Since when nobody answers for a model, and who waits for that to end. Owned by one event loop.

    A router that has just started has met nobody yet, and workers that a registry has lost sight of register again
    within seconds. So a request waits while nobody has answered for less than `grace_s`; after that it never does.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._answering: set[str] = set()
        # By model; those that nobody has ever answered for are waited for since the start.
        self._silent_since_s: dict[str, float] = {}
        self._start_s = time.monotonic()
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """The first view is there: the grace of models that nobody has answered for begins now."""
        self._start_s = time.monotonic()

    def note(self, model: str, answering: bool) -> None:
        """Says whether a worker of `model` answers now."""
        if answering == (model in self._answering):
            return
        now_s = time.monotonic()
        if answering:
            self._answering.add(model)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            return
        self._answering.discard(model)
        self._silent_since_s[model] = now_s
        # Past its grace an entry says no more than the start does.
        self._silent_since_s = {
            name: since_s
            for name, since_s in self._silent_since_s.items()
            if now_s - since_s < self._grace_s
        }

    async def wait(self, model: str, deadline: Deadline) -> bool:
        """Returns once a worker of `model` answers, or the grace or the deadline is over; whether it had to wait."""
        waited = False
        while model not in self._answering:
            since_s = self._silent_since_s.get(model, self._start_s)
            left_s = min(since_s + self._grace_s - time.monotonic(), deadline.remaining_s())
            if left_s <= 0:
                break
            waited = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
        return waited
