"""The computations on what callers send that may take long, and the threads that run them in turns of tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from headrace_common.callers.bounds import FewEach
from headrace_common.tasks import lower_priority

Result = TypeVar("Result")

# A text of this size takes some 50 ms to tokenize. Shorter ones do not wait for longer ones.
_SHORT_BYTES: Final = 64 * 1_024


@dataclass(frozen=True, slots=True)
class Computation:
    """A kind of work. `text_bytes`: tokenizing so many takes as long as a unit of this work."""

    text_bytes: float
    loop_max: int
    """Units that the event loop computes itself. It takes less time than a thread's turn."""


# Each is a row in docs/security.md.
COUNT_VALUES: Final = Computation(1 / 128, 65_536)
"""Counts the values in the bytes of a body."""
PARSE: Final = Computation(1, 2_048)
"""Parses, checks and converts a body of this cost."""
TOKENIZE: Final = Computation(1, 2_048)
"""Checks a request of these bytes, hashes its images, renders its chat and tokenizes it."""
DECODE: Final = Computation(4, 512)
"""Makes texts of tokens."""
LIST_TOKENS: Final = Computation(1 / 4, 8_192)
"""Makes JSON of tokens."""
FORMAT_PROMPT: Final = Computation(128, 16)
"""Makes JSON of the logprobs of a prompt's tokens, and of the answer."""


class TextThreads:
    """One thread for short texts and one for long ones, both of low priority. Streams go first.

    In the queue of each thread a tenant has at most one text, so tenants take turns. A text that is cancelled before
    its turn is never encoded. The admission of requests bounds the waiting ones.
    """

    def __init__(self) -> None:
        self._threads = [
            (ThreadPoolExecutor(1, name, initializer=lower_priority), FewEach())
            for name in ("short-texts", "long-texts")
        ]

    async def run(
        self, tenant: str, kind: Computation, units: int, work: Callable[[], Result]
    ) -> Result:
        """Runs `work` of so many units, on the right thread."""
        if units <= kind.loop_max:
            return work()
        executor, turns = self._threads[units * kind.text_bytes > _SHORT_BYTES]
        async with turns.of(tenant):
            return await asyncio.get_running_loop().run_in_executor(executor, work)

    def close(self) -> None:
        """Drops texts that wait. Does not wait for those that are being encoded."""
        for executor, _ in self._threads:
            executor.shutdown(wait=False, cancel_futures=True)
