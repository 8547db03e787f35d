"""Only requests with an equal salt share cached blocks, in KV memory and in main memory, on prefill and on decode."""

from __future__ import annotations

from random import Random

from headrace_engine.interface import Sampling
from tests.component.engine.kv_event_workers import random_prompt
from tests.component.engine.sim.support import (
    check_answer,
    decode_engine,
    decode_work,
    pair,
)

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
