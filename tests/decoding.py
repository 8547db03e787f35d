"""The events of an engine's decode requests, for tests that read them one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from headrace_engine.interface import DecodeEvent, DecodeTokens, DecodeWork, Engine


class EventSink:
    """An AnswerSink that gives `put` all events, those with nothing but tokens too."""

    def __init__(self, put: Callable[[DecodeEvent], None]) -> None:
        self.put = put

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """See AnswerSink."""
        self.put(DecodeTokens(tuple(token_ids)))


async def decoded(engine: Engine, work: DecodeWork) -> AsyncGenerator[DecodeEvent, None]:
    """The events as they come. Raises the request's error. Closing it aborts the request."""
    events: asyncio.Queue[DecodeEvent | None] = asyncio.Queue()
    task = asyncio.create_task(engine.decode(work, EventSink(events.put_nowait)))
    task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        await task
    finally:
        task.cancel()
        await asyncio.wait({task})
