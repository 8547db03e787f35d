"""A job: answers that another engine has begun, on engines with other settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import cycle

from headrace_engine.interface import Sampling
from tests.vllm.pair import BLOCK_TOKENS, GREEDY, Answer, prompt_of, running_pair

SEEDED = Sampling(temperature=0.9, top_k=50, presence_penalty=0.7, seed=3)
PENALIZED = replace(GREEDY, frequency_penalty=1.2, repetition_penalty=1.5)
CONTINUED = 7


@dataclass(slots=True)
class Compared:
    """Answers of one engine alone, and by the way that two engines share the work."""

    alone: list[list[int]] = field(default_factory=list)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)


async def compare(
    model: str,
    prefill_ranks: int,
    decode_ranks: int,
    decode_blocks: int,
    lengths: list[int],
    answer_tokens: int,
    stages: int,
) -> Compared:
    """Generates each answer on decode alone, and then in every way all at once."""
    changes: dict[str, object] = {
        "model": model,
        "pipeline_parallel_size": stages,
        "max_model_len": min(1024, BLOCK_TOKENS * (decode_blocks - 1)),
        "max_num_batched_tokens": 256,
    }
    decode = changes | {
        "tensor_parallel_size": decode_ranks,
        "num_gpu_blocks_override": decode_blocks,
    }
    prefill = changes | {"tensor_parallel_size": prefill_ranks}
    compared = Compared()
    async with running_pair(prefill=prefill, decode=decode) as pair:
        asked = [
            (prompt_of(length, seed), replace(sampling, max_tokens=answer_tokens))
            for seed, (length, sampling) in enumerate(
                zip(cycle(lengths), (SEEDED, PENALIZED) * 3, strict=False)
            )
        ]
        for prompt, sampling in asked:
            compared.alone.append((await pair.plain(prompt, sampling)).token_ids)
            await pair.reset()
        known = {tuple(prompt): ids for (prompt, _), ids in zip(asked, compared.alone, strict=True)}

        async def continued(prompt: list[int], sampling: Sampling) -> Answer:
            generated = known[tuple(prompt)][:CONTINUED]
            answer = await pair.plain(prompt, sampling, generated)
            answer.token_ids = [*generated, *answer.token_ids]
            return answer

        ways: dict[str, Callable[[list[int], Sampling], Awaitable[Answer]]] = {
            "continued": continued,
            "split": pair.split,
            "after_first": pair.split_after_first,
            "from_hidden_state": pair.split_from_hidden_state,
        }
        for name, run in ways.items():
            answers = await asyncio.gather(*(run(*one) for one in asked))
            compared.answers[name] = [answer.token_ids for answer in answers]
            await pair.reset()
    return compared
