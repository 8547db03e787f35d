"""Callers take turns: one of many requests of one caller in each iteration of the event loop."""

from __future__ import annotations

import asyncio

from headrace_common.callers.turns import FairTurns


async def test_a_caller_alone_never_waits() -> None:
    turns = FairTurns(lambda: True)
    order: list[int] = []

    async def work(number: int) -> None:
        await turns.wait("one")
        order.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(100)]
    await asyncio.sleep(0)
    assert len(order) == 100
    await asyncio.gather(*tasks)


async def test_a_request_of_another_caller_waits_for_one_turn_of_the_first() -> None:
    turns = FairTurns(lambda: False)
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


async def test_each_iteration_gives_one_turn_to_each_caller() -> None:
    turns = FairTurns(lambda: False)
    order: list[str] = []

    async def work(caller: str) -> None:
        await turns.wait(caller)
        order.append(caller)

    async with asyncio.TaskGroup() as group:
        for caller in "aaabbbccc":
            group.create_task(work(caller))
    assert [sorted(order[first : first + 3]) for first in (0, 3, 6)] == [["a", "b", "c"]] * 3


async def test_a_cancelled_wait_takes_no_turn() -> None:
    turns = FairTurns(lambda: False)
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


async def test_a_task_keeps_its_turn_until_it_waits_for_something() -> None:
    turns = FairTurns(lambda: False)
    order: list[str] = []

    async def work(name: str) -> None:
        await turns.wait("one")
        order.append(f"{name} begins")
        await turns.wait("one")
        order.append(f"{name} goes on")
        await asyncio.sleep(0)
        await turns.wait("one")
        order.append(f"{name} ends")

    async with asyncio.TaskGroup() as group:
        for name in "ab":
            group.create_task(work(name))
    assert order[:3] == ["a begins", "a goes on", "b begins"]
    assert order.index("b goes on") == order.index("b begins") + 1
    assert len(order) == 6
