"""A job: answers that another engine has begun, on engines with other settings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from random import Random

from headrace_engine.interface import Sampling
from tests.vllm.pair import GREEDY, Pair, running_pair

SEEDED = Sampling(temperature=0.9, top_k=50, presence_penalty=0.7, seed=3)
PENALIZED = replace(GREEDY, frequency_penalty=1.2, repetition_penalty=1.5)


@dataclass(slots=True)
class Compared:
    """Answers of one engine alone, and continued ones by the way they continue."""

    alone: list[list[int]]
    continued: list[list[int]]
    after_first: list[list[int]]
    from_logits: list[list[int]]


async def compare(
    prefill_ranks: int,
    decode_ranks: int,
    decode_blocks: int,
    max_model_len: int,
    length: int,
    answer_tokens: int,
) -> Compared:
    """Generates each answer on decode alone, and then all continued ones at once."""
    changes: dict[str, object] = {
        "model": "models/tiny-llama",
        "max_model_len": max_model_len,
        "max_num_batched_tokens": 256,
    }
    decode = changes | {
        "tensor_parallel_size": decode_ranks,
        "num_gpu_blocks_override": decode_blocks,
    }
    prefill = changes | {"tensor_parallel_size": prefill_ranks}
    async with running_pair(prefill=prefill, decode=decode) as pair:
        random = Random(length)
        asked = [
            (
                [random.randrange(3, 500) for _ in range(length)],
                replace(sampling, max_tokens=answer_tokens),
            )
            for sampling in (SEEDED, PENALIZED) * 3
        ]
        alone = []
        for prompt, sampling in asked:
            alone.append((await pair.plain(prompt, sampling)).token_ids)
            await pair.reset()
        continued = await asyncio.gather(
            *(
                _continued(pair, prompt, sampling, answer[:7])
                for (prompt, sampling), answer in zip(asked, alone, strict=True)
            )
        )
        await pair.reset()
        after_first = await asyncio.gather(
            *(pair.split_after_first(prompt, sampling) for prompt, sampling in asked)
        )
        await pair.reset()
        from_logits = await asyncio.gather(
            *(pair.split_from_logits(prompt, sampling) for prompt, sampling in asked)
        )
        return Compared(
            alone,
            continued,
            [answer.token_ids for answer in after_first],
            [answer.token_ids for answer in from_logits],
        )


async def _continued(
    pair: Pair, prompt: list[int], sampling: Sampling, generated: list[int]
) -> list[int]:
    answer = await pair.plain(prompt, sampling, generated)
    return [*generated, *answer.token_ids]
