"""Sim engines on a clock that the test advances."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from headrace_engine.interface import DecodeEvent, DecodeTokens
from headrace_engine.sim.clock import ManualClock
from headrace_engine.sim.clock_control import ClockController
from headrace_engine.sim.engine import SimEngine
from tests.component.engine.sim.support import GREEDY, answer_of, decode_engine, decode_work
from tests.waiting import until

PROMPT = list(range(100, 120))
MODEL = "sim:context=512,prefill_s_per_token=0.5,decode_step_s=3"
PROMPT_S = 0.5 * len(PROMPT)


def token_count(events: list[DecodeEvent]) -> int:
    return sum(len(event.token_ids) for event in events if isinstance(event, DecodeTokens))


async def read_all(engine: SimEngine, events: list[DecodeEvent]) -> None:
    async for event in engine.decode(decode_work(PROMPT, replace(GREEDY, max_tokens=4))):
        events.append(event)  # noqa: PERF401 - tests look at the list while it grows


async def test_steps_end_when_they_are_due() -> None:
    clock = ManualClock()
    async with decode_engine(clock=clock, model=MODEL) as engine:
        events: list[DecodeEvent] = []
        reader = asyncio.create_task(read_all(engine, events))
        await until(lambda: engine.usage().running_requests == 1)
        await clock.advance(PROMPT_S - 0.01)
        assert events == []
        # The prompt's step gives the first token.
        await clock.advance(0.01)
        assert token_count(events) == 1
        await clock.advance(2 * 3)
        assert token_count(events) == 3
        assert not reader.done()
        await clock.advance(3)
        await reader
        assert token_count(events) == 4
        assert clock.now_s() == PROMPT_S + 3 * 3


async def test_requests_wait_until_their_clock_is_advanced() -> None:
    clock = ManualClock()
    async with decode_engine(clock=clock, model=MODEL) as engine:
        events: list[DecodeEvent] = []
        reader = asyncio.create_task(read_all(engine, events))
        await asyncio.sleep(0.05)
        assert events == []
        assert clock.next_due_s == PROMPT_S / 2
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        # The blocks are in use until the step ends.
        await clock.advance(PROMPT_S)


async def test_a_controller_advances_every_engine_that_names_its_socket(tmp_path: Path) -> None:
    async with ClockController(tmp_path / "clock") as clock:
        model = f"{MODEL},clock={clock.path}"
        async with decode_engine(model=model) as first, decode_engine(model=model) as second:
            await clock.wait_connected(2)
            answers = [
                asyncio.create_task(answer_of(engine, decode_work(PROMPT)))
                for engine in (first, second)
            ]
            await until(lambda: all(engine.usage().running_requests for engine in (first, second)))
            await clock.advance(PROMPT_S + 4 * 3)
            assert not any(answer.done() for answer in answers)
            await clock.advance_until(lambda: all(task.done() for task in answers), step_s=1.5)
            assert clock.now_s == PROMPT_S + 5 * 3
            for answer in answers:
                assert (await answer)[0] == first.model.expected_tokens(PROMPT, 6)
