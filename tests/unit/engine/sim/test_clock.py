"""A manual clock runs exactly what is due, in order."""

from __future__ import annotations

import asyncio

import pytest

from headrace_engine.sim.stepper import SimClock
from tests.sim_clock import ManualClock


async def count_steps(clock: SimClock, step_s: float, name: str, ended: list[str]) -> None:
    due_s = clock.now_s()
    while True:
        due_s += step_s
        await clock.sleep_until(due_s)
        ended.append(f"{name} {due_s:g}")


async def stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_advance_runs_only_the_due_events() -> None:
    clock, ended = ManualClock(), list[str]()
    tasks = [
        asyncio.create_task(count_steps(clock, step_s, name, ended))
        for name, step_s in (("a", 2.0), ("b", 3.0))
    ]
    await clock.advance(1.9)
    assert ended == []
    await clock.advance(0.1)
    assert ended == ["a 2"]
    await clock.advance(4.0)
    assert sorted(ended[1:]) == ["a 4", "a 6", "b 3", "b 6"]
    assert ended[1:3] == ["b 3", "a 4"]
    assert clock.now_s() == 6.0
    assert clock.next_due_s == 8.0
    await stop(*tasks)
    assert clock.next_due_s is None


async def test_sums_of_fractions_are_due_in_time() -> None:
    clock, ended = ManualClock(), list[str]()
    task = asyncio.create_task(count_steps(clock, 0.1, "a", ended))
    await clock.advance(1.0)
    assert len(ended) == 10
    await stop(task)


async def test_work_that_an_event_starts_runs_within_the_same_advance() -> None:
    clock, work, ended = ManualClock(), asyncio.Event(), list[float]()

    async def worker() -> None:
        while True:
            await clock.wait(work)
            work.clear()
            # Turns of the loop that take no simulated time.
            for _ in range(50):
                await asyncio.sleep(0)
            await clock.sleep_until(clock.now_s() + 1)
            ended.append(clock.now_s())
            work.set()

    task = asyncio.create_task(worker())
    await clock.advance(5)
    assert ended == []
    work.set()
    await clock.advance(3)
    assert ended == [6, 7, 8]
    await stop(task)


async def test_the_event_loops_clock_sleeps_by_the_loop() -> None:
    clock = SimClock()
    start_s = clock.now_s()
    await clock.sleep_until(start_s + 0.02)
    assert clock.now_s() == pytest.approx(start_s + 0.02)
    await clock.sleep_until(start_s)
