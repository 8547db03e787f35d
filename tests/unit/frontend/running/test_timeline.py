"""How long an answer waits for the report of its prefill."""

from __future__ import annotations

import asyncio

import pytest

from headrace_common.deadlines import Deadline
from headrace_frontend.running.timeline import call_when_reported, wait_for_report


async def test_an_answer_without_a_prefill_does_not_wait() -> None:
    start_s = asyncio.get_running_loop().time()
    await wait_for_report(None, Deadline.after(60.0))
    assert asyncio.get_running_loop().time() == start_s


@pytest.mark.parametrize(("reported_s", "called_s"), [(0.4, 0.4), (9.0, 1.0)])
async def test_a_call_is_made_once_when_the_report_is_there_or_late(
    reported_s: float, called_s: float
) -> None:
    loop = asyncio.get_running_loop()
    report: asyncio.Future[None] = loop.create_future()
    loop.call_later(reported_s, report.set_result, None)
    start_s = loop.time()
    calls: list[float] = []
    call_when_reported(report, lambda: calls.append(loop.time() - start_s))
    await asyncio.sleep(10.0)
    assert calls == pytest.approx([called_s], abs=0.01)
