"""The admission of a decode worker's own requests: fair shares of places, slots and blocks, with bounded waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, InvalidRequest, QueueFull
from headrace_decode.admission.admission import Capacity
from headrace_decode.http.admission import OwnAdmission
from headrace_frontend.admission.admission import AdmissionLimits
from tests.waiting import until

# Created at import, so it must outlast the whole run.
LATER = Deadline.after(24 * 3600)
PROMPT, ANSWER = 20, 12
BLOCKS_EACH = 2


def admission(
    *, slots: int = 2, blocks: int = 100, places: int = 64, wait_s: float = 30.0
) -> OwnAdmission:
    """A worker with blocks of 16 tokens."""
    limits = AdmissionLimits(places, 1_000, wait_s)
    return OwnAdmission(limits, Capacity(blocks, 16, 256, slots), "m", dict)


@asynccontextmanager
async def running(
    own: OwnAdmission, tenant: str, deadline: Deadline = LATER, prompt_tokens: int = PROMPT
) -> AsyncIterator[None]:
    permit = await own.admit(tenant, deadline)
    with own.holding(permit):
        async with own.room(permit, prompt_tokens, ANSWER, deadline):
            permit.release_tokens()
            yield


class Requests:
    """Requests that run until they are ended. `started` has their tenants in order."""

    def __init__(self, own: OwnAdmission) -> None:
        self.own = own
        self.started: list[str] = []
        self._ends: dict[str, list[asyncio.Event]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, tenant: str, count: int) -> None:
        self.tasks += [asyncio.create_task(self._run(tenant)) for _ in range(count)]

    async def _run(self, tenant: str) -> None:
        end = asyncio.Event()
        async with running(self.own, tenant):
            self.started.append(tenant)
            self._ends.setdefault(tenant, []).append(end)
            await end.wait()

    def end_one(self, tenant: str) -> None:
        self._ends[tenant].pop(0).set()

    async def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.mark.parametrize("slots, blocks", [(2, 100), (100, 2 * BLOCKS_EACH)])
async def test_a_late_tenant_is_next_before_all_that_wait(slots: int, blocks: int) -> None:
    """The bound is the slots of the worker, or its blocks."""
    requests = Requests(admission(slots=slots, blocks=blocks))
    requests.add("greedy", 8)
    await until(lambda: requests.own.waiting == 6)
    requests.add("late", 1)
    await until(lambda: requests.own.waiting == 7)
    requests.end_one("greedy")
    await until(lambda: len(requests.started) == 3)
    assert requests.started == ["greedy", "greedy", "late"]
    await requests.cancel()
    assert (requests.own.requests, requests.own.waiting) == (0, 0)


async def test_the_places_are_shared_before_any_work() -> None:
    own = admission(places=2)
    held = [await own.admit("greedy", LATER) for _ in range(2)]
    with pytest.raises(QueueFull) as refused:
        await own.admit("greedy", LATER)
    assert refused.value.retry_after_s
    late = asyncio.create_task(own.admit("late", LATER))
    await until(lambda: own.waiting == 1)
    with own.holding(held[0]):
        pass
    assert (await late).tenant == "late"


@pytest.mark.parametrize("slots, blocks", [(1, 100), (100, BLOCKS_EACH)])
async def test_the_wait_ends_at_the_deadline_or_after_the_setting(slots: int, blocks: int) -> None:
    own = admission(slots=slots, blocks=blocks, wait_s=0.05)
    async with running(own, "first"):
        with pytest.raises(DeadlineExceeded, match="room for"):
            async with running(own, "second", Deadline.after(0.02)):
                pass
        # A tenant's second request is beyond its share of one unit.
        with pytest.raises(QueueFull) as refused:
            async with running(own, "first"):
                pass
        assert refused.value.retry_after_s
        assert (own.requests, own.waiting) == (1, 0)
    assert (own.requests, own.waiting) == (0, 0)


async def test_a_prompt_beyond_the_worker_passes_to_the_engine_which_rejects_it() -> None:
    own = admission(blocks=1)
    async with running(own, "a", prompt_tokens=200):
        assert own.requests == 1
    with pytest.raises(InvalidRequest, match="max_queued_tokens is 1000"):
        async with running(own, "a", prompt_tokens=1_001):
            pass
