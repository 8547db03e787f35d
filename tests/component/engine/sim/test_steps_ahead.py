"""A sim engine that plans each step before the results of the one before are handled."""

import asyncio
from dataclasses import replace

import pytest

from headrace_engine.interface import Sampling
from tests.component.engine.sim.support import (
    EVERYTHING,
    GREEDY,
    advance_until,
    answer_of,
    check_answer,
    close,
    decode_engine,
    decode_work,
    pair,
    tokens_of,
)
from tests.sim_clock import ManualClock

PROMPT = list(range(100, 139))
MODELS = ["sim:context=512", EVERYTHING]
SEEDED = Sampling(temperature=0.8, top_p=0.9, seed=42, max_tokens=12, presence_penalty=0.5)
SLOW = "sim:context=512,prefill_s_per_token=1,decode_step_s=1,steps_ahead=on"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_answers_are_correct(model: str, sampling: Sampling) -> None:
    async with pair(model=f"{model},steps_ahead=on", max_num_batched_tokens=16) as both:
        prompts = [PROMPT[number:] for number in range(6)]
        await asyncio.gather(
            *(
                both.generate(prompt, sampling, f"x{number}")
                for number, prompt in enumerate(prompts)
            ),
            *(
                check_answer(both.decode, decode_work(prompt, sampling, transfer_id=f"y{number}"))
                for number, prompt in enumerate(prompts)
            ),
        )


async def test_a_prompt_is_computed_without_a_gap_between_its_chunks() -> None:
    clock = ManualClock()
    async with decode_engine(clock=clock, model=SLOW, max_num_batched_tokens=16) as engine:
        answer = asyncio.create_task(check_answer(engine, decode_work(PROMPT)))
        await advance_until(answer.done, clock)
        # Its last token needs no step ahead, as its length is known.
        assert clock.now_s() == pytest.approx(len(PROMPT) + GREEDY.max_tokens - 1, abs=2)


async def test_blocks_of_an_ended_request_are_held_until_the_step_ahead_ends() -> None:
    """An answer with a stop token. The step ahead still writes to its blocks."""
    clock = ManualClock()
    async with decode_engine(clock=clock, model=SLOW) as engine:
        free = engine.free_block_count()
        tokens = engine.model.expected_tokens(PROMPT, 3)
        stopping = replace(GREEDY, stop_token_ids=(tokens[-1],), max_tokens=40)
        reading = asyncio.create_task(answer_of(engine, decode_work(PROMPT, stopping)))
        await advance_until(reading.done, clock)
        found, end, _ = await reading
        assert (found, end.stopped) == (tokens, True)
        held = free - engine.free_block_count()
        await clock.advance(1.0)
        await asyncio.sleep(0)
        assert engine.guard_violations() == (), "written to while they were free"
        assert held > 0


async def test_a_request_that_is_aborted_in_a_step_leaves_no_block() -> None:
    clock = ManualClock()
    async with decode_engine(clock=clock, model=SLOW) as engine:
        reader = engine.decode(decode_work(PROMPT, replace(GREEDY, max_tokens=40)))
        first = asyncio.ensure_future(anext(reader))
        await advance_until(first.done, clock)
        assert len(tokens_of([await first])) == 1
        await close(reader)
        assert engine.free_block_count() < 64
