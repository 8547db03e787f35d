"""Blocks that are evicted from KV memory are kept in main memory, and loaded back in simulated time."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from headrace_common.callers.priority import Priority
from headrace_common.errors import ConfigError, TransferFailed
from headrace_engine.interface import Sampling
from headrace_engine.sim.engine import SimEngine
from headrace_engine.sim.model.settings import parse_settings
from headrace_kv.prefix.events import Tier
from headrace_kv.storage.tier_copier import DiskStorage
from headrace_kv.transport.memory import Bytes
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

MODEL = "sim:context=512,host_blocks=12"
PROMPT_TOKENS = 80
GREEDY = Sampling(temperature=0.0, max_tokens=3)


async def answer(
    engine: SimEngine, prompt: list[int], name: str, priority: Priority = Priority.NORMAL
) -> int:
    """Checks the answer. Returns how many tokens of the prompt were cached."""
    work = decode_work(prompt, GREEDY, transfer_id=name, priority=priority)
    return (await check_answer(engine, work)).cached_tokens


async def test_evicted_blocks_are_loaded_until_main_memory_evicts_them() -> None:
    random = Random(1)
    first, second, third = (random_prompt(random, PROMPT_TOKENS) for _ in range(3))
    # 16 blocks in KV memory and 12 in main memory; a prompt takes 11, of which 10 are whole.
    async with decode_engine(model=MODEL, num_gpu_blocks_override=16) as engine:
        assert await answer(engine, first, "a") == 0
        assert await answer(engine, second, "b") == 0
        assert engine.tier_loads is not None
        assert engine.tier_loads.loaded_blocks() == {}
        assert await answer(engine, first, "c") == 72
        assert 0 < engine.tier_loads.loaded_blocks()[Tier.HOST] <= 9
        assert await answer(engine, third, "d") == 0
        assert await answer(engine, random_prompt(random, PROMPT_TOKENS), "e") == 0
        # Its last blocks were the first to be evicted.
        assert await answer(engine, second, "f") < 72


@pytest.mark.parametrize(
    ("priority", "cached"), [(Priority.NORMAL, 0), (Priority.LOW, PROMPT_TOKENS - 8)]
)
async def test_low_requests_evict_blocks_of_low_requests(priority: Priority, cached: int) -> None:
    random = Random(1)
    kept = random_prompt(random, PROMPT_TOKENS)
    model = "sim:context=512,host_blocks=24"
    # 40 blocks in KV memory and in main memory; a prompt has 10 whole ones.
    async with decode_engine(model=model, num_gpu_blocks_override=16) as engine:
        assert await answer(engine, kept, "first") == 0
        for number in range(4):
            await answer(engine, random_prompt(random, PROMPT_TOKENS), f"{number}", priority)
        assert await answer(engine, kept, "again") == cached


async def test_blocks_that_main_memory_evicts_return_from_the_disk() -> None:
    random = Random(1)
    prompts = [random_prompt(random, PROMPT_TOKENS) for _ in range(4)]
    model = f"{MODEL},disk_blocks=40"
    async with decode_engine(model=model, num_gpu_blocks_override=16) as engine:
        for number, prompt in enumerate(prompts):
            assert await answer(engine, prompt, f"a{number}") == 0
        for number, prompt in enumerate(prompts):
            assert await answer(engine, prompt, f"b{number}") == 72
        assert engine.tier_loads is not None
        assert engine.tier_loads.loaded_blocks()[Tier.DISK] > 0
        assert await engine.reset_prefix_cache()
        assert await answer(engine, prompts[3], "c") == 0


async def test_blocks_that_the_disk_has_lost_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(storage: DiskStorage, block: int, content: Bytes) -> None:
        raise TransferFailed("the disk fails")

    random = Random(1)
    prompts = [random_prompt(random, PROMPT_TOKENS) for _ in range(4)]
    model = f"{MODEL},disk_blocks=40"
    async with decode_engine(model=model, num_gpu_blocks_override=16) as engine:
        for number, prompt in enumerate(prompts):
            assert await answer(engine, prompt, f"a{number}") == 0
        with monkeypatch.context() as broken:
            broken.setattr(DiskStorage, "read", fail)
            assert await answer(engine, prompts[0], "b") == 0
            assert await answer(engine, prompts[0], "c") == 72
            broken.setattr(DiskStorage, "write", fail)
            for number, prompt in enumerate(prompts):
                await answer(engine, prompt, f"d{number}")
        # What the disk should have taken meanwhile is gone, and nothing else.
        assert await answer(engine, prompts[0], "e") == 0
        assert engine.usage().used_blocks == 0
        assert engine.free_block_count() == 16


async def test_loading_takes_its_time_and_delays_no_other_request() -> None:
    random = Random(2)
    first, second = random_prompt(random, PROMPT_TOKENS), random_prompt(random, PROMPT_TOKENS)
    model = f"{MODEL},prefill_s_per_token=1,host_copy_s_per_token=0.5"
    clock = ManualClock()
    async with decode_engine(clock=clock, model=model, num_gpu_blocks_override=16) as engine:

        async def timed(prompt: list[int], name: str) -> tuple[int, float]:
            start_s = clock.now_s()
            task = asyncio.create_task(answer(engine, prompt, name))
            await until_running(engine)
            await advance_until(task.done, clock, step_s=0.5)
            return await task, clock.now_s() - start_s

        assert await timed(first, "a") == (0, PROMPT_TOKENS)
        assert await timed(second, "b") == (0, PROMPT_TOKENS)
        loading = asyncio.create_task(answer(engine, first, "c"))
        await until_running(engine)
        start_s = clock.now_s()
        other = asyncio.create_task(answer(engine, [1, 2, 3], "d"))
        await until_running(engine, 2)
        await advance_until(other.done, clock, step_s=0.5)
        assert clock.now_s() - start_s == 3
        assert not loading.done()
        await advance_until(loading.done, clock, step_s=0.5)
        assert await loading == 72
        # 5 of the 9 cached blocks are still in KV memory, and the last 8 tokens are computed.
        assert clock.now_s() - start_s == 0.5 * (72 - 40) + 8


@pytest.mark.parametrize(("host_blocks", "disk_blocks"), [(1, 0), (7, 0), (40, 0), (1, 40), (7, 9)])
async def test_answers_are_correct_for_blocks_of_every_tier(
    host_blocks: int, disk_blocks: int
) -> None:
    random = Random(host_blocks)
    beginnings = [random_prompt(random, random.randrange(20, 100)) for _ in range(4)]
    tiers = f"host_blocks={host_blocks},disk_blocks={disk_blocks}"
    model = f"sim:context=512,{tiers},host_copy_s_per_token=0.00001"
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


async def test_blocks_from_main_memory_are_sent() -> None:
    random = Random(3)
    first, second = random_prompt(random, PROMPT_TOKENS), random_prompt(random, PROMPT_TOKENS)
    model = f"{MODEL},host_copy_s_per_token=0.0001"
    cached = []
    async with pair(prefill={"model": model}, num_gpu_blocks_override=16) as engines:
        for number, prompt in enumerate((first, second, first)):
            handed = await engines.generate(prompt, transfer_id=f"x{number}")
            assert handed.outcome is not None
            cached.append(handed.outcome.cached_tokens)
    assert cached == [0, 0, 72]


def test_only_attention_can_be_offloaded() -> None:
    with pytest.raises(ConfigError, match="host_blocks"):
        parse_settings("sim:host_blocks=1,state_layers=1")
    with pytest.raises(ConfigError, match="set host_blocks too"):
        parse_settings("sim:disk_blocks=1")
