"""A job: a pair of engines on one device that keep KV in main memory and on disk."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field

from headrace_kv.tiers.tiers import TierSettings
from tests.gpu.pair import SAMPLING, Tokens, tokens_of
from tests.vllm.pair import prompt_of, running_pair
from tests.vllm.tiers import (
    GIB_PER_BLOCK,
    KV_MEMORY_BLOCKS,
    PROMPT_COUNT,
    PROMPT_TOKENS,
    load_times,
    tier_blocks,
)
from tests.waiting import until


@dataclass(slots=True)
class EvictionResult:
    """By prompt: the answer on an empty cache, after its eviction, and of the pair after eviction from prefill too.

    `cached`: prompt tokens that decode did not compute. `prefill_cached`: those that prefill did not compute.
    `blocks`: of decode, by tier and all faster ones. `load_times`: seconds a block, by tier.
    """

    first: list[Tokens] = field(default_factory=list)
    again: list[Tokens] = field(default_factory=list)
    split: list[Tokens] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    prefill_cached: list[int] = field(default_factory=list)
    blocks: dict[str, int] = field(default_factory=dict)
    load_times: dict[str, float] = field(default_factory=dict)


async def measure(
    model: str, dtype: str, enforce_eager: bool, host_blocks: int, disk_blocks: int
) -> EvictionResult:
    """Answers prompts in turn, so that each is evicted before it comes again."""
    result = EvictionResult()
    with tempfile.TemporaryDirectory() as folder:
        tiers = TierSettings(host_blocks * GIB_PER_BLOCK, disk_blocks * GIB_PER_BLOCK, folder)
        changes: dict[str, object] = {
            "model": model,
            "dtype": dtype,
            "enforce_eager": enforce_eager,
            "kv_cache_gib": 1.0,
            "num_gpu_blocks_override": KV_MEMORY_BLOCKS,
            "max_model_len": 512,
            "tiers": tiers,
        }
        async with running_pair(prefill=changes, decode=changes) as pair:
            pair.decode.prefix_events.set_hash_key(1, "m")
            prompts = [prompt_of(PROMPT_TOKENS, seed) for seed in range(PROMPT_COUNT)]
            for prompt in prompts:
                result.first.append(tokens_of(await pair.plain(prompt, SAMPLING)))
            for prompt in prompts:
                answer = await pair.plain(prompt, SAMPLING)
                result.again.append(tokens_of(answer))
                assert answer.end is not None
                result.cached.append(answer.end.cached_tokens)
            result.blocks = tier_blocks(pair.decode)
            result.load_times = load_times(pair.decode)
            for _ in range(2):
                result.split, result.prefill_cached = [], []
                await until(pair.decode.reset_prefix_cache)
                for prompt in prompts:
                    answer = await pair.split(prompt, SAMPLING)
                    result.split.append(tokens_of(answer))
                    assert answer.prefill is not None
                    result.prefill_cached.append(answer.prefill.cached_tokens)
                    await until(pair.decode.reset_prefix_cache)
    return result
