"""Blocks that are evicted from KV memory are kept in main memory, and loaded back in simulated time."""

from __future__ import annotations

from random import Random

import pytest

from headrace_common.errors import TransferFailed
from headrace_engine.interface import Sampling
from headrace_engine.sim.engine import SimEngine
from headrace_kv.prefix.events import Tier
from headrace_kv.storage.tier_copier import DiskStorage
from headrace_kv.transport.memory import Bytes
from tests.component.engine.kv_event_workers import random_prompt
from tests.component.engine.sim.support import (
    check_answer,
    decode_engine,
    decode_work,
)

MODEL = "sim:context=512,host_blocks=12"
PROMPT_TOKENS = 80
GREEDY = Sampling(temperature=0.0, max_tokens=3)


async def answer(engine: SimEngine, prompt: list[int], name: str) -> int:
    """Checks the answer. Returns how many tokens of the prompt were cached."""
    work = decode_work(prompt, GREEDY, transfer_id=name)
    return (await check_answer(engine, work)).cached_tokens


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
