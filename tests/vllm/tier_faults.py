"""A job: what prefill workers have on disk is lost, and vLLM computes it again (kv_load_failure_policy)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.tiers import TierSettings
from tests.vllm.pair import Answer, Pair, prompt_of, running_pair
from tests.vllm.tier_storm import change_every_page, truncate_files
from tests.vllm.tiers import KV_MEMORY_BLOCKS, PROMPT_COUNT, PROMPT_TOKENS
from tests.waiting import until

# A block of the model has 384 KiB, and a prompt 10 blocks: main memory holds the last prompt and a part of another.
TIERS: Final = TierSettings(host_gib=5 / 1024, disk_gib=100 / 1024)
FAULTS: Final[dict[str, Callable[[Path], int]]] = {
    "changed": change_every_page,
    "truncated": truncate_files,
}


@dataclass(slots=True)
class Result:
    """By prompt: the answer of decode alone, and those of the rounds before, with and after the fault.

    `cached`: prompt tokens that prefill did not compute, by round. `failed_blocks`: what prefill had tried to load from
    its disk at the end of each round. `changed`: the extent of the fault. `left_blocks`: of both engines, at the end.
    """

    plain: list[list[int]] = field(default_factory=list)
    answers: list[list[list[int]]] = field(default_factory=list)
    cached: list[list[int]] = field(default_factory=list)
    failed_blocks: list[int] = field(default_factory=list)
    changed: int = 0
    left_blocks: list[int] = field(default_factory=list)


async def lost_disk(model: str, fault: str, at_once: bool, engine_args: str) -> Result:
    """Hands over the same prompts in each round. `at_once`: the loads of a round fail side by side."""
    with tempfile.TemporaryDirectory() as folder:
        prefill: dict[str, object] = {
            "num_gpu_blocks_override": KV_MEMORY_BLOCKS,
            "max_model_len": 512,
            "tiers": replace(TIERS, disk_folder=folder),
            "engine_args": engine_args,
        }
        async with running_pair(
            prefill={"model": model, **prefill}, decode={"model": model}
        ) as pair:
            result = Result()
            prompts = [prompt_of(PROMPT_TOKENS, seed) for seed in range(PROMPT_COUNT)]
            for prompt in prompts:
                result.plain.append((await pair.plain(prompt)).token_ids)
            # The first round fills the tiers, and the second loads from all of them. Side by side, a
            # prompt may be found in main memory, so a round after the fault may still read what has changed.
            for number in range(5):
                if number == 2:
                    await _evict(pair)
                    result.changed = FAULTS[fault](Path(folder))
                await _round(pair, prompts, result, at_once=at_once and number == 2)
            result.left_blocks = await pair.left_blocks()
    return result


async def _round(pair: Pair, prompts: list[list[int]], result: Result, *, at_once: bool) -> None:
    await until(pair.decode.reset_prefix_cache)
    if at_once:
        answers = await asyncio.gather(*(pair.split(prompt) for prompt in prompts))
    else:
        answers = [await pair.split(prompt) for prompt in prompts]
    result.answers.append([answer.token_ids for answer in answers])
    result.cached.append([_cached(answer) for answer in answers])
    result.failed_blocks.append(pair.prefill.tier_loads.failed_blocks().get(Tier.DISK, 0))


async def _evict(pair: Pair) -> None:
    """Other prompts take the KV memory of prefill, so that no prompt of a round finds its blocks there."""
    for seed in range(100, 100 + KV_MEMORY_BLOCKS // 10):
        await pair.split(prompt_of(PROMPT_TOKENS, seed))


def _cached(answer: Answer) -> int:
    assert answer.prefill is not None
    return answer.prefill.cached_tokens
