"""A job: prefill fetches what decode's engine has in main memory only, and loads for the same request."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_kv.manager.lower_tiers import TierSettings
from headrace_kv.prefix.events import Tier
from tests.vllm.pair import prompt_of
from tests.vllm.prefix_fetch import (
    ANSWER_TOKENS,
    TURN_TOKENS,
    Result,
    VllmWorkers,
    fetching_engines,
    plain_answer,
)
from tests.vllm.tiers import GIB_PER_BLOCK, KV_MEMORY_BLOCKS, PROMPT_COUNT, PROMPT_TOKENS

TURNS = 4
HOST_BLOCKS = 200


@dataclass(slots=True)
class LoadingResult(Result):
    """`loaded_blocks`: those that decode loaded for each turn."""

    loaded_blocks: list[int] = field(default_factory=list)


async def conversation(model: str) -> LoadingResult:
    """Before each turn, other prompts evict the conversation from decode's KV memory."""
    tiers = TierSettings(HOST_BLOCKS * GIB_PER_BLOCK)
    shared: dict[str, object] = {"model": model, "max_model_len": 512}
    decode = shared | {"num_gpu_blocks_override": KV_MEMORY_BLOCKS, "tiers": tiers}
    async with fetching_engines(shared, decode) as workers:
        return await _converse(workers)


async def _converse(workers: VllmWorkers) -> LoadingResult:
    result = LoadingResult()
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
    await result.end(workers, prompts)
    return result


def _loaded(workers: VllmWorkers) -> int:
    return workers.decode.tier_loads.loaded_blocks().get(Tier.HOST, 0)
