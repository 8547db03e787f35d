"""Requests without a pause, while a test disturbs the deployment."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.suite.deployment import DEADLINE_S, Suite, prompt_of
from tests.waiting import until

Asker = Callable[[int, Sequence[int]], Awaitable[tuple[int, ...]]]


@dataclass(slots=True)
class Load:
    """The number of correct answers."""

    right: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def more(self, count: int) -> None:
        """Waits until `count` more answers have come. Returns also when a request has failed."""
        goal = self.right + count
        await until(lambda: self.right >= goal or any(task.done() for task in self.tasks), 60.0)


@asynccontextmanager
async def load(
    it: Suite, streams: int, count: int = 5, asker: Asker | None = None
) -> AsyncIterator[Load]:
    """Asks for `count` tokens on so many streams. The end raises the error of a request, or reports a wrong answer.

    `asker` sends the prompt of a stream in another way.
    """
    seen, stop, numbers = Load(), asyncio.Event(), itertools.count()

    async def ask(stream: int, prompt: Sequence[int]) -> tuple[int, ...]:
        return (await it.generate(prompt, count, timeout_s=DEADLINE_S)).token_ids

    async def keep_asking(stream: int) -> None:
        while not stop.is_set():
            number = next(numbers)
            prompt = prompt_of(30 + number % 120, number)
            assert await (asker or ask)(stream, prompt) == it.expected(prompt, count)
            seen.right += 1

    seen.tasks = [asyncio.create_task(keep_asking(stream)) for stream in range(streams)]
    try:
        yield seen
    finally:
        stop.set()
        await asyncio.gather(*seen.tasks)
