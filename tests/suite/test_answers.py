"""Answers equal the closed form of the model for every arrangement of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suite.deployment import prompt_of, suite

BLOCK = 32


@pytest.mark.parametrize("prefill_ranks,decode_ranks", [(2, 1), (1, 2), (4, 1), (1, 4)])
async def test_answers_are_right_for_every_pair_of_ranks(
    tmp_path: Path, prefill_ranks: int, decode_ranks: int
) -> None:
    async with suite(
        tmp_path,
        prefill_tensor_parallel=prefill_ranks,
        decode_tensor_parallel=decode_ranks,
        settings=(("prefill", "max_num_batched_tokens", "64"),),
    ) as it:
        for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 64, 65, 66, 300):
            prompt = prompt_of(length, length)
            outcome = await it.generate(prompt, 12)
            assert outcome.token_ids == it.expected(prompt, 12), length
            usage = outcome.last.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (length, 12)
            assert usage.transferred_tokens == length - 1
        await it.wait_empty("decode-0")
        await it.wait_empty("prefill-0")


@pytest.mark.core
async def test_a_shared_prefix_is_not_transferred_again(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:
        shared = prompt_of(4 * BLOCK, 1)
        for seed in (2, 3):
            prompt = shared + prompt_of(40, seed)
            outcome = await it.generate(prompt, 4)
            assert outcome.token_ids == it.expected(prompt, 4)
            cached = 0 if seed == 2 else 4 * BLOCK
            assert outcome.last.usage.decode_cached_tokens == cached
            assert outcome.last.usage.transferred_tokens == len(prompt) - 1 - cached
        # Decode has all tokens but the last in its cache, so nothing is transferred.
        exact = shared + prompt_of(1, 4)
        outcome = await it.generate(exact, 4)
        assert outcome.token_ids == it.expected(exact, 4)
        assert outcome.last.usage.transferred_tokens == 0
