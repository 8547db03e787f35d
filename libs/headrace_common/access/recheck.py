"""Ends open calls of callers that may no longer make them, such as after their API key was removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def rechecked(check: Callable[[], object], interval_s: float) -> AsyncIterator[None]:
    """Calls `check` at this interval while the block runs. Ends the block with the error that it raises."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "a call runs in a task"
    refusal: Exception | None = None
    timer: asyncio.TimerHandle

    def check_again() -> None:
        nonlocal refusal, timer
        try:
            check()
        # An error of the check itself ends the call too: without checks it could go on for ever.
        except Exception as error:  # noqa: BLE001
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
