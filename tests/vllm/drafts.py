"""A job: engines with a draft model. Where a draft misses KV, it finds other tokens, and steps have other tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace_engine.interface import Sampling
from tests.vllm.hybrids import mend_rotation
from tests.vllm.pair import CHUNK_TOKENS, Answer, Pair, prompt_of, reset, running_pair

SAMPLING = Sampling(temperature=0.0, max_tokens=48)
CONTEXT_TOKENS = 1600
BLOCK_COUNT = 160
# Less than a block, and more than one and two chunks.
LENGTHS = (20, 200, CHUNK_TOKENS + 90, 2 * CHUNK_TOKENS + 77)
TOGETHER = "together"


@dataclass(slots=True)
class Drafted:
    """By way, for each prompt: the answer's tokens, those of each step of decode, and the prompt's that prefill did not
    compute.

    `groups`: those of the layout, as (name, number of layers, heads). `model`: its identity. `left_blocks`: those in
    use at the end.
    """

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    steps: dict[str, list[list[int]]] = field(default_factory=dict)
    prefill_cached: dict[str, list[int]] = field(default_factory=dict)
    groups: list[tuple[str, int, int]] = field(default_factory=list)
    model: str = ""
    left_blocks: list[int] = field(default_factory=list)


async def answers(
    model: str,
    speculation: dict[str, Any],
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    args: str = "",
    mends_rotation: bool = False,
    ways: Sequence[str] = (),
    lengths: Sequence[int] = LENGTHS,
) -> Drafted:
    """`prefill`, `decode`: settings of that engine. `args`: further arguments of both engines. `mends_rotation`: see
    mend_rotation. `ways`: those of WAYS to compute the answers in, all by default.
    """
    if mends_rotation:
        mend_rotation()
    settings: dict[str, object] = {
        "model": model,
        "max_model_len": CONTEXT_TOKENS,
        "num_gpu_blocks_override": BLOCK_COUNT,
        "engine_args": f"--speculative-config '{json.dumps(speculation)}' {args}",
    }
    async with running_pair(
        prefill=settings | (prefill or {}), decode=settings | (decode or {})
    ) as pair:
        layout = pair.decode.descriptor.layout
        groups = [(one.name, len(one.layers), one.head_count) for one in layout.groups]
        found = Drafted(groups=groups, model=layout.model)
        prompts = [prompt_of(length, seed=4) for length in lengths]
        for way in ways or WAYS:
            for prompt in prompts:
                await pair.reset()
                answer = await WAYS[way](pair, prompt)
                found.tokens.setdefault(way, []).append(answer.token_ids)
                # Another engine or the sampler has made the first token.
                steps = answer.steps if way in (*ALONE, "split") else answer.steps[1:]
                found.steps.setdefault(way, []).append(steps)
                if answer.prefill is not None:
                    cached = answer.prefill.cached_tokens
                    found.prefill_cached.setdefault(way, []).append(cached)
        await pair.reset()
        together = await asyncio.gather(*(pair.split(prompt, SAMPLING) for prompt in prompts))
        found.tokens[TOGETHER] = [answer.token_ids for answer in together]
        found.left_blocks = await pair.left_blocks()
        return found


async def _alone(pair: Pair, prompt: list[int]) -> Answer:
    return await pair.plain(prompt, SAMPLING)


async def _alone_after_first(pair: Pair, prompt: list[int]) -> Answer:
    """The other ways' answer on one engine, which gets its first token with the prompt."""
    first = (await pair.plain(prompt, replace(SAMPLING, max_tokens=1))).token_ids
    await reset(pair.decode)
    answer = await pair.plain(prompt, SAMPLING, first)
    return replace(answer, token_ids=[*first, *answer.token_ids])


async def _split(pair: Pair, prompt: list[int]) -> Answer:
    return await pair.split(prompt, SAMPLING)


async def _after_first(pair: Pair, prompt: list[int]) -> Answer:
    return await pair.split_after_first(prompt, SAMPLING)


async def _from_hidden_state(pair: Pair, prompt: list[int]) -> Answer:
    return await pair.split_from_hidden_state(prompt, SAMPLING)


async def _prefill_has_it(pair: Pair, prompt: list[int]) -> Answer:
    """Prefill sends what it has computed for another answer."""
    await pair.split_after_first(prompt, replace(SAMPLING, max_tokens=2))
    await reset(pair.decode)
    return await pair.split_after_first(prompt, SAMPLING)


async def _both_have_a_part(pair: Pair, prompt: list[int]) -> Answer:
    """Decode has drafted behind that part."""
    await pair.split_after_first(prompt[: len(prompt) // 2], replace(SAMPLING, max_tokens=20))
    return await pair.split_after_first(prompt, SAMPLING)


ALONE: dict[str, Callable[[Pair, list[int]], Awaitable[Answer]]] = {
    "alone": _alone,
    "alone after first": _alone_after_first,
}
WAYS: dict[str, Callable[[Pair, list[int]], Awaitable[Answer]]] = ALONE | {
    "split": _split,
    "after first": _after_first,
    "from hidden state": _from_hidden_state,
    "prefill has it": _prefill_has_it,
    "both have a part": _both_have_a_part,
}
