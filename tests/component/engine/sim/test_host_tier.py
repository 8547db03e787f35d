"""Blocks that leave KV memory stay in main memory for a while, with every byte, and come back for a price."""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.interface import Sampling
from headrace_engine.sim.engine import SimEngine
from headrace_engine.sim.model.settings import parse_settings
from tests.component.engine.prefix.workers import random_prompt
from tests.component.engine.sim.support import (
    answer_of,
    decode_engine,
    decode_work,
    pair,
)

MODEL = "sim:context=512,host_blocks=12"
PROMPT_TOKENS = 80
GREEDY = Sampling(temperature=0.0, max_tokens=3)


async def answer(engine: SimEngine, prompt: list[int], name: str) -> int:
    """Checks the answer; what of the prompt was cached."""
    work = decode_work(prompt, GREEDY, transfer_id=name)
    tokens, end, _ = await answer_of(engine, work)
    assert tokens == engine.model.expected_tokens(prompt, GREEDY.max_tokens)
    return end.cached_tokens


async def test_evicted_blocks_come_back_until_main_memory_gives_them_up() -> None:
    random = Random(1)
    first, second, third = (random_prompt(random, PROMPT_TOKENS) for _ in range(3))
    # 16 blocks in KV memory and 12 in main memory; a prompt takes 11, of which 10 are whole.
    async with decode_engine(model=MODEL, num_gpu_blocks_override=16) as engine:
        assert await answer(engine, first, "a") == 0
        assert await answer(engine, second, "b") == 0
        assert await answer(engine, first, "c") == 72
        assert await answer(engine, third, "d") == 0
        assert await answer(engine, random_prompt(random, PROMPT_TOKENS), "e") == 0
        # What was given up first, from its end, is not all there any more.
        assert await answer(engine, second, "f") < 72


async def test_copying_takes_its_time_and_holds_nobody_else_up() -> None:
    random = Random(2)
    first, second = random_prompt(random, PROMPT_TOKENS), random_prompt(random, PROMPT_TOKENS)
    model = f"{MODEL},prefill_s_per_token=0.03,host_copy_s_per_token=0.02"
    async with decode_engine(model=model, num_gpu_blocks_override=16) as engine:
        await answer(engine, first, "a")
        await answer(engine, second, "b")
        start_s = time.monotonic()
        copied = asyncio.create_task(answer(engine, first, "c"))
        await asyncio.sleep(0.01)
        assert await answer(engine, [1, 2, 3], "d") == 0
        assert not copied.done()
        cached = await copied
        took_s = time.monotonic() - start_s
    assert cached == 72
    copied_s = 0.02 * (72 - 40)
    # Some of it may have stayed in KV memory; computing all of it would have taken 2.4 s.
    assert copied_s < took_s < 2.1


@pytest.mark.parametrize("host_blocks", [1, 7, 40])
async def test_answers_are_right_whatever_comes_from_where(host_blocks: int) -> None:
    random = Random(host_blocks)
    beginnings = [random_prompt(random, random.randrange(20, 100)) for _ in range(4)]
    model = f"sim:context=512,host_blocks={host_blocks},host_copy_s_per_token=0.00001"
    cached = 0
    async with decode_engine(
        model=model, num_gpu_blocks_override=40, tensor_parallel_size=2
    ) as engine:
        for number in range(40):
            prompts = []
            for _ in range(3):
                beginning = random.choice(beginnings)
                cut = random.randrange(1, len(beginning))
                prompts.append(beginning[:cut] + random_prompt(random, random.randrange(1, 40)))
            found = await asyncio.gather(
                *(answer(engine, prompt, f"{number}-{i}") for i, prompt in enumerate(prompts))
            )
            cached += sum(found)
    assert cached > 0


async def test_what_comes_from_main_memory_is_handed_over() -> None:
    random = Random(3)
    first, second = random_prompt(random, PROMPT_TOKENS), random_prompt(random, PROMPT_TOKENS)
    model = f"{MODEL},host_copy_s_per_token=0.0001"
    outcomes = []
    async with pair(prefill={"model": model}, num_gpu_blocks_override=16) as engines:
        for number, prompt in enumerate((first, second, first)):
            handed = await engines.generate(prompt, transfer_id=f"x{number}")
            assert handed.tokens == engines.decode.model.expected_tokens(prompt, len(handed.tokens))
            outcomes.append(handed.outcome)
    cached = [outcome.cached_tokens for outcome in outcomes if outcome is not None]
    assert cached == [0, 0, 72]


def test_only_attention_can_be_kept() -> None:
    with pytest.raises(ConfigError, match="host_blocks"):
        parse_settings("sim:host_blocks=1,state_layers=1")
