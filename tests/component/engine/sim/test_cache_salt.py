"""Only requests with an equal salt share cached blocks, in KV memory and in main memory, on prefill and on decode."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from headrace_engine.interface import Sampling
from tests.component.engine.kv_event_workers import random_prompt
from tests.component.engine.sim.support import (
    advance_until,
    check_answer,
    decode_engine,
    decode_work,
    pair,
    until_running,
)
from tests.sim_clock import ManualClock

ONE, OTHER = "aa", "bb"
GREEDY = Sampling(temperature=0.0, max_tokens=3)


async def test_prefill_and_decode_count_hits_of_the_same_salt_only() -> None:
    prompt = random_prompt(Random(1), 83)
    cached = []
    async with pair() as engines:
        for number, salt in enumerate((ONE, OTHER, "", ONE, OTHER, "")):
            # Its own second prompt differs in the last block, so that prefill has something to compute.
            changed = prompt if number < 3 else [*prompt[:-8], *[9] * 8]
            handed = await engines.generate(changed, transfer_id=f"x{number}", cache_salt=salt)
            assert handed.outcome is not None
            assert handed.end.cached_tokens == handed.reservation.start_token
            cached.append((handed.end.cached_tokens, handed.outcome.cached_tokens))
    assert cached == [(0, 0)] * 3 + [(72, 72)] * 3


async def test_a_prompt_of_another_salt_takes_as_long_as_a_new_one() -> None:
    prompt = random_prompt(Random(2), 85)
    clock = ManualClock()
    model = "sim:context=512,prefill_s_per_token=1"
    async with decode_engine(clock=clock, model=model) as engine:
        taken = []
        for number, salt in enumerate((ONE, OTHER, ONE)):
            work = decode_work(prompt, GREEDY, transfer_id=f"x{number}", cache_salt=salt)
            start_s = clock.now_s()
            answer = asyncio.create_task(check_answer(engine, work))
            await until_running(engine)
            await advance_until(answer.done, clock)
            taken.append((clock.now_s() - start_s, (await answer).cached_tokens))
    assert taken == [(85, 0), (85, 0), (5, 80)]


async def test_blocks_in_main_memory_are_separate_too() -> None:
    random = Random(3)
    first, second = random_prompt(random, 80), random_prompt(random, 80)
    async with decode_engine(
        model="sim:context=512,host_blocks=40", num_gpu_blocks_override=16
    ) as engine:
        cached = []
        for number, (prompt, salt) in enumerate(
            (
                (first, ONE),
                (second, ONE),
                (first, OTHER),
                (second, OTHER),
                (first, ONE),
                (first, OTHER),
            )
        ):
            work = decode_work(prompt, GREEDY, transfer_id=f"x{number}", cache_salt=salt)
            cached.append((await check_answer(engine, work)).cached_tokens)
    assert cached == [0, 0, 0, 0, 72, 72]


@pytest.mark.parametrize("model", ["sim:context=512", "sim:context=512,index_layers=1"])
async def test_answers_are_right_while_many_salts_evict_each_other(model: str) -> None:
    random = Random(4)
    beginnings = [random_prompt(random, 60) for _ in range(2)]
    hits = dict.fromkeys((ONE, OTHER, ""), 0)
    async with decode_engine(model=model, num_gpu_blocks_override=40) as engine:
        for number in range(40):
            salt = random.choice(list(hits))
            prompt = random.choice(beginnings) + random_prompt(random, random.randrange(1, 20))
            work = decode_work(prompt, GREEDY, transfer_id=f"x{number}", cache_salt=salt)
            hits[salt] += (await check_answer(engine, work)).cached_tokens
    assert all(hits.values())
