"""The threads on which prompts become tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace_common.callers.bounds import OneEach
from headrace_common.tasks import lower_priority

# The event loop itself prepares a request of this size. That takes less time than a thread's turn.
_INLINE_BYTES = 2_048
# A text of this size takes some 50 ms. Shorter ones do not wait for longer ones.
_SHORT_BYTES = 64 * 1_024
Result = TypeVar("Result")


class TextThreads:
    """One thread for short texts and one for long ones, both of low priority. Streams go first.

    In the queue of each thread a tenant has at most one text, so tenants take turns. A text that is cancelled before
    its turn is never encoded. The admission of requests bounds the waiting ones.
    """

    def __init__(self) -> None:
        self._short = _TextThread("short-texts")
        self._long = _TextThread("long-texts")

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], Result]) -> Result:
        """Runs `work`, for a request of this size, on the right thread."""
        if size_bytes <= _INLINE_BYTES:
            return work()
        thread = self._short if size_bytes <= _SHORT_BYTES else self._long
        return await thread.run(tenant, work)

    def close(self) -> None:
        """Drops texts that wait. Does not wait for those that are being encoded."""
        self._short.close()
        self._long.close()


class _TextThread:
    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=lower_priority)
        self._turns = OneEach()

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        async with self._turns.of(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
