"""How long requests wait for a decode worker when none is reachable."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from headrace_common.deadlines import Deadline
from headrace_router.workers.directory import WorkerAvailability

LONG = Deadline(math.inf)


async def _waited_s(availability: WorkerAvailability, deadline: Deadline = LONG) -> float:
    started_s = time.monotonic()
    await availability.wait("a", deadline)
    return time.monotonic() - started_s


async def test_all_waiting_requests_continue_when_a_worker_is_reachable() -> None:
    availability = WorkerAvailability(60)
    waits = [asyncio.create_task(availability.wait("a", LONG)) for _ in range(3)]
    await asyncio.sleep(0.01)
    availability.update("b", True)
    await asyncio.sleep(0.01)
    assert not any(wait.done() for wait in waits)
    availability.update("a", True)
    async with asyncio.timeout(1):
        assert all(await asyncio.gather(*waits))


async def test_the_grace_begins_with_the_first_view_and_never_again() -> None:
    availability = WorkerAvailability(0.5)
    await asyncio.sleep(0.4)
    availability.start()
    assert await _waited_s(availability) > 0.4
    assert not await availability.wait("a", LONG)
    assert not await availability.wait("another", LONG)


async def test_a_request_waits_no_longer_than_its_deadline() -> None:
    availability = WorkerAvailability(60)
    assert await _waited_s(availability, Deadline.after(0.1)) == pytest.approx(0.1)


async def test_without_a_grace_no_request_waits() -> None:
    availability = WorkerAvailability(0)
    assert not await availability.wait("a", LONG)
    availability.update("a", True)
    assert not await availability.wait("a", LONG)
    availability.update("a", False)
    assert not await availability.wait("a", LONG)
