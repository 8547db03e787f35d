"""Waiting for a condition that another task, thread or process brings about."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Final

PATIENCE_S: Final = 30.0
"""Limit of a wait that ends much earlier, unless something is broken. A machine that stands still does not reach it."""
_WRONG_STEP_S: Final = 0.05


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    timeout_s: float = PATIENCE_S,
    what: str | Callable[[], str] = "",
    interval_s: float = 0.002,
) -> None:
    """Returns when `condition` holds, which may be asynchronous. Raises AssertionError after `timeout_s`.

    `what` describes the condition in that error. A callable is evaluated after the timeout.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            while not await _holds(condition):
                await asyncio.sleep(interval_s)
    except TimeoutError:
        if not limit.expired():
            raise
        text = what() if callable(what) else what
        raise AssertionError(f"not within {timeout_s} s: {text or 'the condition'}") from None


async def forever() -> None:
    """Returns never: a call of a fake that a test or a deadline ends."""
    await asyncio.Event().wait()


async def let_a_wrong_step_show() -> None:
    """Gives the code time for a step that it must not take. No test waits by this for a step that it must take."""
    await asyncio.sleep(_WRONG_STEP_S)


async def _holds(condition: Callable[[], bool | Awaitable[bool]]) -> bool:
    result = condition()
    return await result if inspect.isawaitable(result) else result
