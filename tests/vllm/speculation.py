"""A job: a decode engine that drafts tokens from the request's own, beside a prefill engine that does not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headrace_engine.interface import Sampling
from tests.decoding import decoded
from tests.vllm.pair import Answer, prompt_of, running_pair

SAMPLING = Sampling(temperature=0.0, max_tokens=96)
SPECULATION = '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}\''


@dataclass(slots=True)
class SpeculationResult:
    """Tokens by prompt: of the engine without drafts alone, and of both engines in each way of hand-over.

    `steps`: outputs of decode, by answer.
    """

    plain: list[list[int]] = field(default_factory=list)
    split: list[list[int]] = field(default_factory=list)
    after_first: list[list[int]] = field(default_factory=list)
    together: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


async def measure(model: str) -> SpeculationResult:
    """Prompts of repeated pieces."""
    config: dict[str, object] = {"model": model}
    result = SpeculationResult()
    async with running_pair(prefill=config, decode={**config, "engine_args": SPECULATION}) as pair:
        prompts = [prompt_of(length, seed=2) * 3 for length in (20, 75, 190)]
        for prompt in prompts:
            plain = Answer()
            async for event in decoded(pair.prefill, pair.work(prompt, SAMPLING, remote_kv=False)):
                plain.take(event)
            result.plain.append(plain.token_ids)
            split = await pair.split(prompt, SAMPLING)
            result.split.append(split.token_ids)
            result.steps.append(len(split.steps))
            await pair.reset()
            after_first = await pair.split_after_first(prompt, SAMPLING)
            result.after_first.append(after_first.token_ids)
            await pair.reset()
        together = await asyncio.gather(*(pair.split(prompt, SAMPLING) for prompt in prompts))
        result.together = [answer.token_ids for answer in together]
    return result
