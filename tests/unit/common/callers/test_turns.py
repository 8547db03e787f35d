"""Callers take turns: a few of many requests of one caller in each iteration of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from headrace_common.callers.bounds import TURNS_S, CallerTurns


@pytest.mark.parametrize("turn_s", [0.0001, 0.001, 0.01])
async def test_another_caller_waits_for_one_iteration_of_bounded_time(turn_s: float) -> None:
    now_s = 0.0
    turns = CallerTurns({"a": 2}, lambda: now_s)
    order: list[str] = []

    async def work(caller: str) -> None:
        nonlocal now_s
        await turns.wait(caller)
        now_s += turn_s
        order.append(caller)

    many = [asyncio.create_task(work("many")) for _ in range(100)]
    while len(order) < 20:
        await asyncio.sleep(0)
    came_s, came = now_s, len(order)
    one = asyncio.create_task(work("one"))
    await one
    assert now_s - came_s <= 2 * max(TURNS_S, 2 * turn_s)
    # Cheap turns share an iteration.
    assert len(order) - came > 3 or turn_s > TURNS_S / 3
    await asyncio.gather(*many)
    assert order.count("many") == 100


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
