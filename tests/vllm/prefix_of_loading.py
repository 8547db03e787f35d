"""A job: prefill fetches what decode's engine has in main memory only, and loads for the same request."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from headrace_kv.manager.settings import TierSettings
from headrace_kv.prefix.events import Tier
from tests.vllm.pair import prompt_of, reset
from tests.vllm.prefix_fetch import (
    ANSWER_TOKENS,
    LONG_S,
    TURN_TOKENS,
    VllmWorkers,
    fetching_engines,
    is_free,
    plain_answer,
)
from tests.vllm.tiers import GIB_PER_BLOCK, KV_MEMORY_BLOCKS, PROMPT_COUNT, PROMPT_TOKENS
from tests.waiting import until

TURNS = 4
HOST_BLOCKS = 200


@dataclass(slots=True)
class Result:
    """By turn: the answers, those of the decode engine alone, and the tokens and reason of each fetch.

    `expected_tokens`: what decode had more than prefill. `loaded_blocks`: those that decode loaded for the turn.
    `left_blocks`: of both engines, at the end.
    """

    answers: list[list[int]] = field(default_factory=list)
    plain: list[list[int]] = field(default_factory=list)
    fetched_tokens: list[int] = field(default_factory=list)
    expected_tokens: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    loaded_blocks: list[int] = field(default_factory=list)
    left_blocks: list[int] = field(default_factory=list)


async def conversation(model: str) -> Result:
    """Before each turn, other prompts evict the conversation from decode's KV memory."""
    tiers = TierSettings(HOST_BLOCKS * GIB_PER_BLOCK)
    shared: dict[str, object] = {"model": model, "max_model_len": 512}
    decode = shared | {"num_gpu_blocks_override": KV_MEMORY_BLOCKS, "tiers": tiers}
    async with fetching_engines(shared, decode) as workers:
        return await _converse(workers)


async def _converse(workers: VllmWorkers) -> Result:
    result = Result()
    prompts: list[list[int]] = []
    prompt: list[int] = []
    for number in range(TURNS):
        prompt = [*prompt, *prompt_of(TURN_TOKENS, number)]
        prompts.append(prompt)
        before = _loaded(workers)
        turn = await workers.run(prompt, ANSWER_TOKENS)
        result.loaded_blocks.append(_loaded(workers) - before)
        if number:
            result.expected_tokens.append(turn.start_token - turn.done.cached_tokens)
        result.answers.append(list(turn.tokens))
        prompt = [*prompt, *turn.tokens]
        for other in range(PROMPT_COUNT):
            await plain_answer(workers.decode, prompt_of(PROMPT_TOKENS, 10 * number + other))
    result.reasons = [fetch.reason for fetch in workers.fetches]
    result.fetched_tokens = [fetch.token_count for fetch in workers.fetches]
    for engine in (workers.prefill, workers.decode):
        await until(partial(is_free, engine), LONG_S)
        result.left_blocks.append(engine.load.used_blocks)
    for prompt in prompts:
        await reset(workers.decode)
        result.plain.append(await plain_answer(workers.decode, prompt))
    return result


def _loaded(workers: VllmWorkers) -> int:
    return workers.decode.tier_loads.loaded_blocks().get(Tier.HOST, 0)
