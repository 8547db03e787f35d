"""Sim engines on a clock that the test advances."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from headrace_engine.interface import DecodeEvent
from headrace_engine.sim.clock import ManualClock
from headrace_engine.sim.clock_control import ClockController
from tests.component.engine.sim.support import (
    GREEDY,
    check_answer,
    decode_engine,
    decode_work,
    tokens_of,
    until_running,
)
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


async def test_a_controller_advances_every_engine_that_names_its_socket(tmp_path: Path) -> None:
    async with ClockController(tmp_path / "clock") as clock:
        model = f"{MODEL},clock={clock.path}"
        async with decode_engine(model=model) as first, decode_engine(model=model) as second:
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
