"""A job: engines with LoRA adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace_kv.prefix.cache_salt import adapter_salt
from headrace_kv.prefix.events import Tier
from tests.vllm.pair import GREEDY, Answer, Pair, prompt_of, running_pair
from tests.waiting import until

NAMES = ("", "poet", "coder")
LENGTHS = (40, 161)
SAMPLING = replace(GREEDY, max_tokens=8)
FOLDER = "models/tiny-llama-adapters"
ARGUMENTS = f"--enable-lora --lora-modules poet={FOLDER}/poet coder={FOLDER}/coder"


@dataclass(slots=True)
class AdapterResult:
    """By adapter, and then by prompt. `plain` are the tokens of the decode engine alone.

    `split`, `hidden`: of both engines, with the first token from KV and from a hidden state.
    `together` and `mixed`: of both and of decode alone, with all adapters in one batch. `cached`: tokens of a repeated
    prompt in decode's cache. `digests`: of each engine's adapters. `announced`: blocks that decode announces.
    """

    plain: dict[str, list[list[int]]] = field(default_factory=dict)
    split: dict[str, list[list[int]]] = field(default_factory=dict)
    hidden: dict[str, list[list[int]]] = field(default_factory=dict)
    mixed: dict[str, list[list[int]]] = field(default_factory=dict)
    together: dict[str, list[list[int]]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    digests: list[dict[str, str]] = field(default_factory=list)
    announced: int = 0


async def measure(model: str) -> AdapterResult:
    """Answers the same prompts with each adapter, and with the model alone."""
    result = AdapterResult()
    changes: dict[str, object] = {"model": model, "engine_args": ARGUMENTS}
    async with running_pair(prefill=dict(changes), decode=dict(changes)) as pair:
        for engine in (pair.prefill, pair.decode):
            result.digests.append({one.name: one.digest for one in engine.adapters})
        pair.decode.prefix_events.set_hash_key(1, "m")
        prompts = [prompt_of(length) for length in LENGTHS]
        for name in NAMES:
            more = _terms(pair, name)
            result.plain[name] = [
                (await pair.plain(prompt, SAMPLING, **more)).token_ids for prompt in prompts
            ]
        await pair.reset()
        for name in NAMES:
            result.split[name] = [(await _split(pair, name, one)).token_ids for one in prompts]
        await until(lambda: _announced(pair) > 0)
        for name in NAMES:
            answers = [
                await pair.split_from_hidden_state(one, SAMPLING, **_terms(pair, name))
                for one in prompts
            ]
            result.hidden[name] = [answer.token_ids for answer in answers]
        for name in NAMES:
            again = await _split(pair, name, prompts[-1])
            assert again.reservation is not None
            result.cached[name] = again.reservation.start_token
        result.announced = _announced(pair)
        await pair.reset()
        together = await asyncio.gather(
            *(_split(pair, name, prompt) for name in NAMES for prompt in prompts)
        )
        result.together = _by_name(together)
        await pair.reset()
        mixed = await asyncio.gather(
            *(
                pair.plain(prompt, SAMPLING, **_terms(pair, name))
                for name in NAMES
                for prompt in prompts
            )
        )
        result.mixed = _by_name(mixed)
    return result


def _by_name(answers: Sequence[Answer]) -> dict[str, list[list[int]]]:
    count = len(LENGTHS)
    return {
        name: [answer.token_ids for answer in answers[number * count : (number + 1) * count]]
        for number, name in enumerate(NAMES)
    }


def _terms(pair: Pair, name: str) -> dict[str, Any]:
    """As the router fills them in."""
    adapters = {one.name: one for one in pair.decode.adapters}
    adapter = adapters.get(name)
    return {"adapter": adapter, "cache_salt": adapter_salt("", adapter)}


async def _split(pair: Pair, name: str, prompt: list[int]) -> Answer:
    return await pair.split(prompt, SAMPLING, **_terms(pair, name))


def _announced(pair: Pair) -> int:
    """Blocks that decode announces to routers."""
    counts = {
        Tier(event.tier): event.announced_count for event in pair.decode.prefix_events.heartbeats()
    }
    return counts.get(Tier.DEVICE, 0)
