"""Blocks in the host tier are credited less than blocks in KV memory, and are reused correctly."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.inference.v1 import inference_pb2
from tests.suite.deployment import greedy, prompt_of, suite

LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
SETTINGS = (
    ("decode", "model", "sim:host_blocks=32,host_copy_s_per_token=0.0001"),
    ("decode", "block_size", "16"),
    ("decode", "num_gpu_blocks_override", "24"),
)
PROMPT_TOKENS = 16 * 16 + 1
HOST_CREDIT = 0.75


async def test_evicted_prefixes_are_announced_credited_explained_and_used(tmp_path: Path) -> None:
    async with suite(tmp_path, settings=SETTINGS) as it:
        first, second = (prompt_of(PROMPT_TOKENS, number) for number in range(2))

        async def credit(prompt: list[int]) -> int:
            (candidate,) = (await it.operator.explain(greedy(prompt, 1))).candidates
            return candidate.cached_tokens

        async def credited(prompt: list[int], tokens: int) -> None:
            async with asyncio.timeout(20):
                while await credit(prompt) != tokens:
                    await asyncio.sleep(0.02)

        async def cached(prompt: list[int]) -> int:
            outcome = await it.generate(prompt, 4, placement=LOCAL)
            assert outcome.token_ids == it.expected(prompt, 4)
            return outcome.last.usage.decode_cached_tokens

        whole = PROMPT_TOKENS - 1
        assert await cached(first) == 0
        await credited(first, whole)
        # Of 24 blocks the first prompt cached 16 and the second takes 17, so 9 are evicted from the end.
        assert await cached(second) == 0
        await credited(second, whole)
        here = whole - 16 * (17 - (24 - 16))
        await credited(first, here + int(HOST_CREDIT * (whole - here)))
        assert await cached(first) == whole
        await credited(first, whole)
        await it.wait_empty("decode-0")
