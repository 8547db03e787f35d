"""A job: a conversation about images on services with two engines, where prefill fetches what decode has."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headrace.inference.v1 import image_pb2
from headrace_engine.interface import DecodeTokens, DecodeWork, Sampling
from tests.decoding import decoded
from tests.vllm.image_prompts import FAMILIES, PROMPTS, Prompt, text
from tests.vllm.images import EncoderCounts, engine_settings
from tests.vllm.pair import reset
from tests.vllm.prefix_fetch import VllmWorkers, fetching_engines
from tests.waiting import until

TURNS = 4
ANSWER_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Fetched:
    """By turn: the answers, those of decode alone, and the tokens of each fetch with its reason.

    `encoded`: images that decode has encoded before it answered alone.
    """

    answers: list[list[int]] = field(default_factory=list)
    plain: list[list[int]] = field(default_factory=list)
    fetched_tokens: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)


async def converse(model: str) -> Fetched:
    """Before each turn, prefill forgets what it has."""
    os.environ["OMP_NUM_THREADS"] = "1"
    counts = EncoderCounts()
    prompt = FAMILIES[Path(model).name].prompt(PROMPTS["two images"])
    asked: list[Prompt] = []
    found = Fetched()
    config = engine_settings(model)
    async with fetching_engines(config, config) as workers:
        for turn in range(TURNS):
            asked.append(prompt)
            images = [
                image_pb2.PromptImage(
                    data=one.data,
                    content_hash=one.content_hash,
                    start_token=one.start_token,
                    token_count=one.token_count,
                )
                for one in prompt.images
            ]
            run = await workers.run(prompt.token_ids, ANSWER_TOKENS, images)
            found.answers.append(list(run.tokens))
            prompt = prompt + run.tokens + text(30, 60 + turn)
            await reset(workers.prefill)
        found.fetched_tokens.extend(fetch.token_count for fetch in workers.fetches)
        found.reasons.extend(fetch.reason for fetch in workers.fetches)
        found.encoded.append(counts.of("decode"))
        await until(partial(_is_free, workers))
        for one in asked:
            await reset(workers.decode)
            found.plain.append(await _alone(workers, one))
    return found


def _is_free(workers: VllmWorkers) -> bool:
    return workers.prefill.load.used_blocks == workers.decode.load.used_blocks == 0


async def _alone(workers: VllmWorkers, prompt: Prompt) -> list[int]:
    work = DecodeWork(
        f"alone{len(prompt.token_ids)}",
        prompt.token_ids,
        Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS),
        remote_kv=False,
        images=prompt.images,
    )
    tokens: list[int] = []
    async for event in decoded(workers.decode, work):
        if isinstance(event, DecodeTokens):
            tokens.extend(event.token_ids)
    return tokens
