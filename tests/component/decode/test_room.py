"""Own requests of a decode worker wait for room beside those of routers, in the order of arrival."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, DecodeFull, InvalidRequest
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.http.room import RoomQueue
from tests.component.decode.conftest import Served, request
from tests.component.decode.prefill_rank import RESERVATION, next_event
from tests.linked_call import LinkedCall
from tests.waiting import until

WAIT_S = 30.0
# The worker of the fixture has as many.
SLOTS = 2


def start(
    room: RoomQueue, name: str, wait_s: float = WAIT_S, deadline_s: float = WAIT_S
) -> asyncio.Task[DecodeAttempt]:
    asked = request(name, remote_prefill=False)
    return asyncio.create_task(room.start(asked, Deadline.after(deadline_s), wait_s))


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
    room = RoomQueue(served.service.attempts)
    routed = await fill(served)
    tasks = [start(room, f"own-{number}") for number in range(3)]
    with pytest.raises(DecodeFull, match="all 2 request slots are taken"):
        await start(room, "impatient", wait_s=0.01)
    assert not any(task.done() for task in tasks)
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


async def test_a_request_that_arrives_as_room_becomes_free_overtakes_none(served: Served) -> None:
    room = RoomQueue(served.service.attempts)
    routed = await fill(served)
    waiting = start(room, "own-0")
    await asyncio.sleep(0)
    arrived: list[asyncio.Task[DecodeAttempt]] = []

    def room_is_free() -> None:
        # The new request runs before those that the queue wakes.
        arrived.append(start(room, f"late-{len(arrived)}"))
        room._freed.set()

    served.service.attempts.notify_room(room_is_free)
    routed[0].cancel()
    first = await waiting
    assert len(arrived) == 1
    assert not arrived[0].done()
    served.service.attempts.notify_room(room._freed.set)
    routed[1].cancel()
    for one in (first, await arrived[0]):
        one.end()


async def test_the_deadline_ends_the_wait_and_nothing_stays(served: Served) -> None:
    room = RoomQueue(served.service.attempts)
    routed = await fill(served)
    with pytest.raises(DeadlineExceeded, match="room beside other requests"):
        await start(room, "own-0", deadline_s=0.05)
    cancelled = start(room, "own-1")
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    for call in routed:
        call.cancel()
    running = await start(room, "own-2")
    running.end()
    await until(lambda: served.service.attempts.status().reserved_blocks == 0)


async def test_an_error_that_no_wait_helps_is_raised_at_once(served: Served) -> None:
    room = RoomQueue(served.service.attempts)
    asked = request("own-0", token_ids=list(range(300)), remote_prefill=False)
    with pytest.raises(InvalidRequest, match="shorter than the context"):
        await room.start(asked, Deadline.after(WAIT_S), WAIT_S)
