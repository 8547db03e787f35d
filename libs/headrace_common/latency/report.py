"""Waits for the late report of a request's prefill, without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from headrace_common.deadlines import Deadline

REPORT_WAIT_S: Final = 1.0
"""Longest wait: a report comes at about the time of the first token."""


async def wait_for_report(report: asyncio.Future[Any] | None, deadline: Deadline) -> None:
    """Returns once the report is there, after REPORT_WAIT_S or half of the time to the deadline at the latest.

    The other half is for the answer that the report is a part of.
    """
    if report is not None:
        await asyncio.wait({report}, timeout=min(REPORT_WAIT_S, deadline.remaining_s() / 2))


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
