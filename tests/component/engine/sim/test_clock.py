"""Sim engines on a clock that the test advances."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_engine.interface import DecodeEvent
from tests.component.engine.sim.support import (
    GREEDY,
    check_answer,
    decode_engine,
    decode_work,
    tokens_of,
    until_running,
)
from tests.sim_clock import ClockController, ManualClock, RemoteClock
from tests.unit.engine.sim.test_clock import count_steps, stop
from tests.waiting import until

PROMPT = list(range(100, 120))
MODEL = "sim:context=512,prefill_s_per_token=0.5,decode_step_s=3"
PROMPT_S = 0.5 * len(PROMPT)


async def test_steps_end_when_they_are_due() -> None:
    clock = ManualClock()
    async with decode_engine(clock=clock, model=MODEL) as engine:
        events: list[DecodeEvent] = []

        async def read_all() -> None:
            async for event in engine.decode(decode_work(PROMPT, replace(GREEDY, max_tokens=4))):
                events.append(event)  # noqa: PERF401 - the list is read while it grows

        reader = asyncio.create_task(read_all())
        await until_running(engine)
        await clock.advance(PROMPT_S - 0.01)
        assert events == []
        # The prompt's step gives the first token.
        await clock.advance(0.01)
        assert len(tokens_of(events)) == 1
        await clock.advance(2 * 3)
        assert len(tokens_of(events)) == 3
        assert not reader.done()
        await clock.advance(3)
        await reader
        assert len(tokens_of(events)) == 4
        assert clock.now_s() == PROMPT_S + 3 * 3


async def test_a_controller_advances_every_engine_with_a_clock_of_its_socket(
    tmp_path: Path,
) -> None:
    async with ClockController(tmp_path / "clock") as clock:
        clocks = RemoteClock(clock.path), RemoteClock(clock.path)
        async with (
            decode_engine(model=MODEL, clock=clocks[0]) as first,
            decode_engine(model=MODEL, clock=clocks[1]) as second,
        ):
            await clock.wait_connected(2)
            answers = [
                asyncio.create_task(check_answer(engine, decode_work(PROMPT)))
                for engine in (first, second)
            ]
            await until(lambda: all(engine.usage().running_requests for engine in (first, second)))
            await clock.advance(PROMPT_S + 4 * 3)
            assert not any(answer.done() for answer in answers)
            await clock.advance_until(lambda: all(task.done() for task in answers), step_s=1.5)
            assert clock.now_s == PROMPT_S + 5 * 3
            await asyncio.gather(*answers)
        for remote in clocks:
            await remote.close()


async def test_a_controller_advances_the_clocks_that_are_connected(tmp_path: Path) -> None:
    ended: list[str] = []
    async with ClockController(tmp_path / "clock") as controller:
        clocks = [RemoteClock(controller.path) for _ in range(2)]
        for clock in clocks:
            await clock.connect()
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
        late = RemoteClock(controller.path)
        await late.connect()
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


async def test_waiting_for_the_controllers_condition_has_a_limit(tmp_path: Path) -> None:
    async with ClockController(tmp_path / "clock") as controller:
        with pytest.raises(TimeoutError, match="did not hold"):
            await controller.advance_until(lambda: False, step_s=1.0, timeout_s=0.05)
        with pytest.raises(TimeoutError):
            await controller.wait_connected(1, timeout_s=0.05)
