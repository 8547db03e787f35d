"""Requests beyond the capacity are refused, and a deployment without a prefill worker answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace_common.errors import DecodeFull, InvalidRequest, QueueFull
from tests.suite.deployment import greedy, prompt_of, suite

SLOW_DECODE = ("decode", "model", "sim:decode_step_s=0.02")


@pytest.mark.core
async def test_a_full_deployment_sends_a_retry_delay(tmp_path: Path) -> None:
    settings = (
        ("decode", "max_num_seqs", "2"),
        ("router", "admission_wait_s", "0.1"),
        SLOW_DECODE,
    )
    async with suite(tmp_path, settings=settings) as it:
        prompts = [prompt_of(20, number) for number in range(2)]
        running = await it.begun([greedy(prompt, 150) for prompt in prompts])
        with pytest.raises(QueueFull, match="2 of 2 decode slots") as refused:
            await it.generate(prompt_of(20, 9), 5)
        # No request has ended yet, so the router has no estimate.
        assert refused.value.retry_after_s == pytest.approx(0.5)
        for prompt, outcome in zip(prompts, await asyncio.gather(*running), strict=True):
            assert outcome.token_ids == it.expected(prompt, 150)
        again = await it.generate(prompts[0], 5)
        assert again.token_ids == it.expected(prompts[0], 5)


async def test_blocks_bound_what_is_admitted(tmp_path: Path) -> None:
    # 20 blocks of 32 tokens hold two such requests. Engines reserve one block.
    settings = (("decode", "num_gpu_blocks_override", "20"), SLOW_DECODE)
    async with suite(tmp_path, settings=settings) as it:
        running = await it.begun([greedy(prompt_of(200, number), 80) for number in range(2)])
        with pytest.raises(DecodeFull, match="blocks"):
            await it.generate(prompt_of(200, 5), 80)
        await asyncio.gather(*running)
        with pytest.raises(InvalidRequest):
            await it.generate(prompt_of(1_000, 6), 80)
        await it.wait_empty("decode-0")


async def test_without_a_prefill_worker_decode_prefills(tmp_path: Path) -> None:
    async with suite(tmp_path, prefill_count=0) as it:
        prompt = prompt_of(100, 1)
        outcome = await it.generate(prompt, 6)
        assert outcome.token_ids == it.expected(prompt, 6)
        assert outcome.last.usage.transferred_tokens == 0
