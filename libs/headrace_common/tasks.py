"""Helpers for asyncio tasks that belong to one object."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def run_forever(loop: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts a task that should end only when cancelled. If it fails, the log has the exception."""
    task = asyncio.create_task(loop, name=name)
    task.add_done_callback(_log_failure)
    return task


async def end_task(task: asyncio.Task[_Result] | None) -> None:
    """Cancels a task and waits for its end."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.critical("%s ended because of a bug", task.get_name(), exc_info=task.exception())
