"""Every first-token policy gives the same answer. They differ in which token waits for the transfer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import first_token_pb2, inference_pb2
from tests.suite.deployment import Outcome, greedy, prompt_of, suite

PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
DECODE = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
HIDDEN = first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 180)
# The number of tokens, and how they are chosen.
CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (2, {}),
    (7, {"presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.8}),
    (8, {"temperature": 0.9, "top_p": 0.9, "seed": 5, "logprobs": 1}),
    (9, {"logprobs": 2}),
)


def asked(length: int, count: int, policy: int, **sampling: Any) -> inference_pb2.GenerateRequest:
    request = greedy(prompt_of(length, 10 * length + count), count, **sampling)
    request.first_token = first_token_pb2.FirstTokenPolicy.ValueType(policy)
    return request


def said(outcome: Outcome) -> tuple[Any, ...]:
    """All fields that a client could use to distinguish answers."""
    usage, reason = outcome.last.usage, outcome.last.finish_reason
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return outcome.token_ids, outcome.logprobs, outcome.text, reason, counts


@pytest.mark.core
async def test_every_policy_gives_the_same_answer(tmp_path: Path) -> None:
    batched = (("prefill", "max_num_batched_tokens", "64"),)
    async with suite(tmp_path, prefill_count=2, decode_count=2, settings=batched) as it:

        async def compare(length: int, count: int, sampling: dict[str, Any]) -> None:
            # One after the other. The first one finds no cached prefix.
            policies = (PREFILL, HIDDEN, DECODE) if length % 2 else (HIDDEN, PREFILL, DECODE)
            requests = [asked(length, count, policy, **sampling) for policy in policies]
            answers = [await it.ask(request) for request in requests]
            assert answers[0].token_ids == it.expected_of(requests[0]), (length, count)
            assert all(said(answer) == said(answers[0]) for answer in answers), (length, count)
            usage = answers[0].last.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (length, count)
            # A single token is computed on decode, because a remote first token would gain nothing.
            if count > 1 < length:
                assert (usage.decode_cached_tokens, usage.transferred_tokens) == (0, length)

        await asyncio.gather(
            *(compare(length, count, sampling) for length in LENGTHS for count, sampling in CASES)
        )
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            await it.wait_empty(name)
