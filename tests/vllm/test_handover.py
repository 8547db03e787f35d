"""Prefill on one vLLM, decode on another, compared with vLLM alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.sent_layers import sent_layers
from tests.vllm.conftest import ON_PAIR
from tests.vllm.pair import BLOCK_TOKENS, CHUNK_TOKENS, GREEDY, Pair, prompt_of
from tests.waiting import until

pytestmark = ON_PAIR

LENGTHS = (1, 2, 33, 127, 128, 129, 255, 256, 257, 511, 1000, 1500)


def layer_count(pair: Pair) -> int:
    return pair.decode.descriptor.layout.layer_count


def block_bytes(pair: Pair) -> int:
    """Bytes of one block in all layers."""
    layout = pair.decode.descriptor.layout
    layer = layout.groups[0].bytes_between(0, layout.block_tokens, layout.kv_head_count)
    return layout.layer_count * layer


@pytest.mark.core
@pytest.mark.parametrize("length", LENGTHS)
async def test_greedy_tokens_equal_plain_vllm(pair: Pair, length: int) -> None:
    prompt = prompt_of(length)
    plain = await pair.plain(prompt)
    await pair.reset()
    split = await pair.split(prompt)
    await pair.reset()
    assert split.token_ids == plain.token_ids
    assert len(split.token_ids) == GREEDY.max_tokens
    assert split.end is not None
    assert not split.end.stopped
    assert split.end.cached_tokens == 0
    assert split.reservation is not None
    assert (split.reservation.start_token, split.reservation.end_token) == (0, length - 1)
    if length == 1:
        assert split.summary is None
        return
    assert split.summary is not None
    assert split.prefill is not None
    blocks = -(-(length - 1) // BLOCK_TOKENS)
    assert split.summary.payload_bytes == blocks * block_bytes(pair)


async def test_a_short_prompt_is_computed_beside_long_ones(pair: Pair) -> None:
    prompts = [prompt_of(1_000), prompt_of(999), prompt_of(998), prompt_of(30)]
    # A new engine has not learned how long its steps take.
    for seed in range(6):
        await pair.split(prompt_of(200 * seed + 20, seed))
    answers = await asyncio.gather(*map(pair.split, prompts))
    *long, short = [answer.prefill for answer in answers]
    await pair.reset()
    assert short is not None
    ended = [one.compute_end_unix_ns for one in long if one is not None]
    assert len(ended) == 3
    assert short.compute_end_unix_ns < min(ended)


async def test_the_scheduler_reports_when_the_first_step_starts(pair: Pair) -> None:
    """By the monotonic clock, which all processes of a host share."""
    split = await pair.split(prompt_of(300))
    end_ns = time.monotonic_ns()
    assert 0 < split.arrived_ns <= split.step_start_ns <= end_ns
    plain = await pair.plain(prompt_of(40, seed=3))
    await pair.reset()
    assert end_ns <= plain.step_start_ns <= time.monotonic_ns()


async def test_chunks_are_sent_while_later_chunks_are_computed(pair: Pair) -> None:
    """A paused machine may delay the sending threads, but hardly five times in a row."""
    length = 1501
    chunk_count = -(-(length - 1) // CHUNK_TOKENS)
    for seed in range(5):
        split = await pair.split(prompt_of(length, seed))
        await pair.reset()
        assert split.summary is not None
        assert split.prefill is not None
        assert split.summary.acknowledgement_count == layer_count(pair) * chunk_count
        layers = sent_layers(split.prefill.reports)
        first_chunk = [sent for sent in layers if sent.times.start_token == 0]
        assert len(first_chunk) == layer_count(pair)
        assert all(sent.times.end_token == CHUNK_TOKENS for sent in first_chunk)
        # The last chunk starts after the last layer of the chunk before it.
        last_chunk_start_ns = max(
            sent.ready_unix_ns
            for sent in layers
            if sent.times.end_token <= CHUNK_TOKENS * (chunk_count - 1)
        )
        outcome = split.prefill
        assert outcome.compute_start_unix_ns < last_chunk_start_ns < outcome.compute_end_unix_ns
        if split.summary.first_ack_unix_ns < last_chunk_start_ns:
            return
    pytest.fail("no chunk arrived before the last one was computed, in any of five prompts")


@pytest.mark.core
async def test_layers_are_sent_before_the_forward_pass_ends(pair: Pair) -> None:
    """A paused machine may delay the sending threads, but hardly five times in a row."""
    for seed in range(5):
        split = await pair.split(prompt_of(500, seed))
        await pair.reset()
        assert split.summary is not None
        assert split.prefill is not None
        ready = [sent.ready_unix_ns for sent in sent_layers(split.prefill.reports)]
        assert ready == sorted(ready)
        assert ready[0] < ready[-1]
        if split.summary.first_ack_unix_ns < split.prefill.compute_end_unix_ns:
            return
    pytest.fail("no layer arrived before the forward pass had ended, in any of five prompts")


async def test_prompts_of_one_step_share_what_only_that_step_computes(pair: Pair) -> None:
    """vLLM takes blocks for cached as soon as it plans to fill them, before they hold the KV."""
    sampling = replace(GREEDY, logprobs=1)
    shared = prompt_of(2 * BLOCK_TOKENS, seed=1)
    prompts = [shared + prompt_of(10 + number, seed=2) for number in range(3)]
    plain = [await pair.plain(prompt, sampling) for prompt in prompts]
    await pair.reset()
    # While its chunks are computed, the others queue. The step of its last chunk has room for them.
    long = asyncio.create_task(pair.split(prompt_of(3 * CHUNK_TOKENS + 300)))
    await until(lambda: pair.prefill.load.running_requests > 0)
    split = await asyncio.gather(*(pair.split(prompt, sampling) for prompt in prompts))
    await long
    await pair.reset()
    for one, other in zip(split, plain, strict=True):
        assert one.token_ids == other.token_ids
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    cached = sorted(one.prefill.cached_tokens for one in split if one.prefill is not None)
    assert cached == [0, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS]
