"""Waiting for a condition that another task or process brings about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 10.0, what: str = "") -> None:
    """Returns when `condition` holds. Fails after `timeout_s`, naming `what` was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what or 'the condition'}"
        await asyncio.sleep(0.02)
