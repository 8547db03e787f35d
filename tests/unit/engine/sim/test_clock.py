"""A manual clock runs exactly what is due, in order, in this process and in others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.sim.clock import EventLoopClock, ManualClock, SimClock
from headrace_engine.sim.clock_control import ClockController, RemoteClock, open_clock


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


async def test_the_event_loops_clock_sleeps_in_real_time() -> None:
    clock = open_clock("")
    assert isinstance(clock, EventLoopClock)
    start_s = clock.now_s()
    await clock.sleep_until(start_s + 0.02)
    assert clock.now_s() >= start_s + 0.02
    await clock.sleep_until(start_s)


async def test_a_controller_advances_the_clocks_that_are_connected(tmp_path: Path) -> None:
    ended: list[str] = []
    async with ClockController(tmp_path / "clock") as controller:
        clocks = [open_clock(str(controller.path)) for _ in range(2)]
        for clock in clocks:
            await clock.start()
        await controller.wait_connected(2)
        tasks = [
            asyncio.create_task(count_steps(clock, 1.0, name, ended))
            for clock, name in zip(clocks, "ab", strict=True)
        ]
        await controller.advance(2.5)
        assert sorted(ended) == ["a 1", "a 2", "b 1", "b 2"]
        await controller.advance_until(lambda: len(ended) == 8, step_s=0.5)
        assert controller.now_s == 4.0
        await clocks[0].close()
        late = RemoteClock(str(controller.path))
        await late.start()
        await controller.wait_connected(3)
        await controller.advance(1.0)
        assert controller.engine_count == 2
        assert late.now_s() == clocks[1].now_s() == 5.0
        assert ended[8:] == ["b 5"]
        await late.close()
        await stop(*tasks)
    # Without a controller the time goes on, so that requests can end.
    async with asyncio.timeout(5):
        await clocks[1].sleep_until(5.1)
    await clocks[1].close()


async def test_a_clock_without_a_controller_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.clock") as raised:
        await open_clock(str(tmp_path / "none")).start()
    assert raised.value.metadata["field"] == "model.clock"


async def test_waiting_for_the_controllers_condition_has_a_limit(tmp_path: Path) -> None:
    async with ClockController(tmp_path / "clock") as controller:
        with pytest.raises(TimeoutError, match="did not hold"):
            await controller.advance_until(lambda: False, step_s=1.0, timeout_s=0.05)
        with pytest.raises(TimeoutError):
            await controller.wait_connected(1, timeout_s=0.05)
