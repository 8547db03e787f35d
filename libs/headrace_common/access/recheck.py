"""Ends open calls of callers that may no longer make them, such as after their API key was removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace_common.errors import HeadraceError


@asynccontextmanager
async def rechecked(check: Callable[[], object], interval_s: float) -> AsyncIterator[None]:
    """Calls `check` at this interval while the block runs. Ends the block with the HeadraceError that it raises."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "a call runs in a task"
    refusal: HeadraceError | None = None
    timer: asyncio.TimerHandle

    def check_again() -> None:
        nonlocal refusal, timer
        try:
            check()
        except HeadraceError as error:
            refusal = error
            task.cancel()
        else:
            timer = loop.call_later(interval_s, check_again)

    timer = loop.call_later(interval_s, check_again)
    try:
        yield
    except asyncio.CancelledError:
        if refusal is None:
            raise
        task.uncancel()
        raise refusal from None
    finally:
        timer.cancel()
