"""Waiting for a condition that another task, thread or process brings about."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    timeout_s: float = 10.0,
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


async def _holds(condition: Callable[[], bool | Awaitable[bool]]) -> bool:
    result = condition()
    return await result if inspect.isawaitable(result) else result
