"""Own requests of a decode worker wait for room beside those of routers, in the order of arrival."""

from __future__ import annotations

import asyncio
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, DecodeFull, InvalidRequest
from headrace_decode.admission import Capacity
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.http.dispatcher import BlockShares
from tests.component.decode.conftest import Served, request
from tests.component.decode.prefill_rank import RESERVATION, next_event
from tests.linked_call import LinkedCall
from tests.waiting import until

WAIT_S = 30.0
# The worker of the fixture has as many.
SLOTS = 2


def shares(served: Served, wait_s: float = WAIT_S) -> BlockShares:
    return BlockShares(served.service.attempts, Capacity(1_000, 16, 256, SLOTS), dict, wait_s)


def start(
    own: BlockShares, name: str, deadline_s: float = WAIT_S, *, closes: bool = True, **changes: Any
) -> asyncio.Task[DecodeAttempt]:
    asked = request(name, remote_prefill=False, **changes)
    prepared: Any = SimpleNamespace(
        token_ids=asked.token_ids,
        sampling=asked.sampling,
        tenant="a",
        priority=Priority.NORMAL,
    )

    async def run() -> DecodeAttempt:
        deadline = Deadline.after(deadline_s)
        held = await own.acquire(prepared, deadline)
        with closing(held) if closes else nullcontext():
            return await own.start(held, deadline, asked)

    return asyncio.create_task(run())


async def fill(served: Served) -> list[LinkedCall]:
    """Requests of routers in all slots, each with blocks of its own."""
    calls = []
    for number in range(SLOTS):
        name = f"routed-{number}"
        blocks = tuple(range(3 + 3 * number, 6 + 3 * number))
        served.engine.play_for(name, replace(RESERVATION, transfer_id=name, block_ids=blocks))
        call = served.generate(request(name))
        assert await next_event(aiter(call)) == "reserved"
        calls.append(call)
    return calls


async def test_own_requests_start_in_order_as_others_end(served: Served) -> None:
    own = shares(served)
    routed = await fill(served)
    tasks = [start(own, f"own-{number}") for number in range(3)]
    await until(lambda: own.pool.waiting == 3)
    routed[0].cancel()
    first = await tasks[0]
    assert not tasks[1].done()
    routed[1].cancel()
    second = await tasks[1]
    assert not tasks[2].done()
    first.end()
    third = await tasks[2]
    for one in (second, third):
        one.end()


async def test_a_request_beyond_its_share_is_refused_by_what_is_missing(served: Served) -> None:
    own = shares(served, wait_s=0.01)
    (await start(own, "own-0", closes=False)).end()
    await fill(served)
    with pytest.raises(DecodeFull, match="all 2 request slots are taken"):
        await start(own, "own-1")


async def test_the_deadline_ends_the_wait_and_nothing_stays(served: Served) -> None:
    own = shares(served)
    routed = await fill(served)
    with pytest.raises(DeadlineExceeded, match="room for"):
        await start(own, "own-0", deadline_s=0.05)
    cancelled = start(own, "own-1")
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    for call in routed:
        call.cancel()
    (await start(own, "own-2")).end()
    await until(lambda: served.service.attempts.status().reserved_blocks == 0)
    assert (own.pool.used, own.pool.waiting) == (0, 0)


async def test_an_error_that_no_wait_helps_is_raised_at_once(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="shorter than the context"):
        await start(shares(served), "own-0", token_ids=list(range(300)))
