"""Waits for the late report of a request's prefill, without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

REPORT_WAIT_S: Final = 1.0
"""Longest wait: a report comes at about the time of the first token."""


def call_when_reported(report: asyncio.Future[Any] | None, call: Callable[[], None]) -> None:
    """Calls `call` once: now if no report is missing, else when it is there, after REPORT_WAIT_S at the latest."""
    if report is None:
        call()
        return
    waiting = [call]

    def once(_: object = None) -> None:
        timer.cancel()
        if waiting:
            waiting.pop()()

    timer = asyncio.get_running_loop().call_later(REPORT_WAIT_S, once)
    report.add_done_callback(once)
