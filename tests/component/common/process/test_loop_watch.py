"""The watch of an event loop. It needs a real thread and a real clock."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace_common.telemetry.metrics.listener import loop_watched
from tests.waiting import until

STUCK_S = 1.0


async def test_a_stuck_loop_is_reported_with_its_call_until_it_turns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ages_s: list[float] = []

    def compute_long() -> None:
        end_s = time.monotonic() + 30.0
        while not ages_s[-1] and time.monotonic() < end_s:
            pass

    with loop_watched(ages_s.append, stuck_s=STUCK_S, interval_s=0.02):
        await asyncio.sleep(0.5)
        assert ages_s == [0.0]
        compute_long()
        await until(lambda: ages_s[-1] == 0.0)
    assert max(ages_s) > STUCK_S
    stuck, turns = (record.getMessage() for record in caplog.records)
    assert "compute_long" in stuck
    assert "turns again" in turns
