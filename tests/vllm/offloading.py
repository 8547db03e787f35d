"""A job: engines that keep KV in main memory by vLLM's own OffloadingConnector, beside ours."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field

from tests.vllm.pair import ENGINE_ARGS, Answer, Pair, prompt_of, running_pair
from tests.vllm.tiers import KV_MEMORY_BLOCKS, PROMPT_COUNT, PROMPT_TOKENS
from tests.waiting import until

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 256 * 2**20,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "tests.vllm.host_offload",
    },
}
TURNS = 36
AT_ONCE = 4


@dataclass(slots=True)
class Result:
    """By prompt: the answer on an empty cache, after its eviction, and with the second half from prefill.

    `cached`: prompt tokens that decode did not compute. `received`: the first token that it received from prefill.
    `prefill_cached`: tokens that prefill did not compute. `wrong`: of many turns side by side. `left_blocks`: of both
    engines, at the end.
    """

    first: list[list[int]] = field(default_factory=list)
    again: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    split: list[list[int]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    prefill_cached: list[int] = field(default_factory=list)
    wrong: int = 0
    left_blocks: list[int] = field(default_factory=list)


async def conversations(model: str, engine_args: str = ENGINE_ARGS) -> Result:
    """Answers prompts in turn, so that each is evicted from KV memory before it comes again. Then many at once."""
    changes: dict[str, object] = {
        "model": model,
        "num_gpu_blocks_override": KV_MEMORY_BLOCKS,
        "max_model_len": 512,
        "engine_args": f"--kv-transfer-config '{json.dumps(OFFLOADING)}' {engine_args}",
    }
    async with running_pair(prefill=changes, decode=changes) as pair:
        result = Result()
        prompts = [prompt_of(PROMPT_TOKENS, seed) for seed in range(PROMPT_COUNT)]
        for prompt in prompts:
            result.first.append((await pair.plain(prompt)).token_ids)
        for prompt in prompts:
            answer = await pair.plain(prompt)
            result.again.append(answer.token_ids)
            assert answer.end is not None
            result.cached.append(answer.end.cached_tokens)
        for _ in range(2):
            result.split, result.received, result.prefill_cached = [], [], []
            await until(pair.decode.reset_prefix_cache)
            for prompt in prompts:
                await pair.plain(prompt[: PROMPT_TOKENS // 2])
            for prompt in prompts:
                _take(result, await pair.split(prompt))
        result.wrong = await _many(pair)
        result.left_blocks = await pair.left_blocks()
    return result


def _take(result: Result, answer: Answer) -> None:
    assert answer.reservation is not None
    assert answer.prefill is not None
    result.split.append(answer.token_ids)
    result.received.append(answer.reservation.start_token)
    result.prefill_cached.append(answer.prefill.cached_tokens)


async def _many(pair: Pair, seed: int = 1) -> int:
    """Turns side by side, with and without prefill, of prompts that share beginnings. Returns how many were wrong."""
    numbers = random.Random(seed)
    beginnings = [prompt_of(numbers.choice((64, 128, 160)), 200 + one) for one in range(4)]
    prompts = [
        numbers.choice(beginnings) + prompt_of(numbers.randrange(20, 160), 300 + one)
        for one in range(12)
    ]
    expected = []
    for prompt in prompts:
        await until(pair.decode.reset_prefix_cache)
        expected.append((await pair.plain(prompt)).token_ids)
    places = asyncio.Semaphore(AT_ONCE)

    async def turn(index: int, *, split: bool) -> bool:
        async with places:
            answer = await (pair.split if split else pair.plain)(prompts[index])
        return answer.token_ids != expected[index]

    turns = [
        turn(numbers.randrange(len(prompts)), split=numbers.random() < 0.6) for _ in range(TURNS)
    ]
    return sum(await asyncio.gather(*turns))
