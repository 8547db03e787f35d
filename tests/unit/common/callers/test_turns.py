"""Callers take turns: one of many requests of one caller in each iteration of the event loop."""

from __future__ import annotations

import asyncio

from headrace_common.callers.bounds import CallerTurns


async def test_a_request_of_another_caller_waits_for_one_turn_of_the_first() -> None:
    turns = CallerTurns({"a": 2})
    order: list[str] = []

    async def work(caller: str) -> None:
        await turns.wait(caller)
        order.append(caller)

    many = [asyncio.create_task(work("many")) for _ in range(50)]
    await asyncio.sleep(0)
    one = asyncio.create_task(work("one"))
    await one
    assert order.count("many") <= 3
    assert turns.waiting >= 47
    await asyncio.gather(*many)
    assert order.count("many") == 50


async def test_a_cancelled_wait_takes_no_turn() -> None:
    turns = CallerTurns({"a": 2})
    first = asyncio.create_task(turns.wait("one"))
    await first
    cancelled = [asyncio.create_task(turns.wait("one")) for _ in range(5)]
    last = asyncio.create_task(turns.wait("one"))
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.wait_for(last, 5)
    await asyncio.gather(*cancelled, return_exceptions=True)
    assert not turns.waiting
