"""A job: engines that share KV in a remote pool."""

from __future__ import annotations

import signal
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headrace_kv.manager.settings import TierSettings
from tests.pool_store import Store
from tests.vllm.pair import Pair, prompt_of, running_pair
from tests.waiting import until

PROMPT_TOKENS = 321
PROMPT_COUNT = 2
HASH_KEY = 5
# Longer than a call of a working store takes on a busy machine.
TIMEOUT_S = 20.0
PUBLISHED_S = 90.0


@dataclass(slots=True)
class Result:
    """By prompt: the answer of decode after a prefill elsewhere, and from the pool alone.

    `cached`: prompt tokens that decode then computed neither itself nor received. `without`: the answer and the cached
    tokens once the store is killed.
    """

    handed: list[list[int]] = field(default_factory=list)
    pooled: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    without: list[list[int]] = field(default_factory=list)
    cached_without: list[int] = field(default_factory=list)


async def shared(model: str, tensor_parallel_size: int) -> Result:
    """Lets prefill store prompts in a pool, from which decode loads them with its own cache empty."""
    with tempfile.TemporaryDirectory(prefix="headrace-pool-") as folder:
        store = Store(Path(folder))
        try:
            await store.wait()
            return await _shared(store, model, tensor_parallel_size)
        finally:
            store.end()


async def _shared(store: Store, model: str, tensor_parallel_size: int) -> Result:
    def settings(*, publishes: bool) -> dict[str, object]:
        return {
            "model": model,
            "tensor_parallel_size": tensor_parallel_size,
            "max_model_len": 512,
            "tiers": TierSettings(
                host_gib=1 / 16,
                pool_address=store.address,
                pool_timeout_s=TIMEOUT_S,
                publishes=publishes,
            ),
        }

    prompts = [prompt_of(PROMPT_TOKENS, seed) for seed in range(PROMPT_COUNT)]
    result = Result()
    async with running_pair(
        prefill=settings(publishes=True), decode=settings(publishes=False)
    ) as pair:
        for engine in (pair.prefill, pair.decode):
            assert engine.prefix_events is not None
            engine.prefix_events.set_hash_key(HASH_KEY, "m")
        for prompt in prompts:
            result.handed.append((await pair.split(prompt)).token_ids)
            await until(partial(_is_pooled, pair, prompt, result), PUBLISHED_S)
        store.signal(signal.SIGKILL)
        for prompt in prompts:
            await pair.reset()
            answer = await pair.plain(prompt)
            assert answer.end is not None
            result.without.append(answer.token_ids)
            result.cached_without.append(answer.end.cached_tokens)
    return result


async def _is_pooled(pair: Pair, prompt: list[int], result: Result) -> bool:
    """Whether decode has loaded the whole prompt from the pool. Else prefill computes it once more."""
    await until(pair.decode.reset_prefix_cache)
    answer = await pair.plain(prompt)
    assert answer.end is not None
    if answer.end.cached_tokens < PROMPT_TOKENS - 1:
        await pair.reset()
        await pair.split(prompt)
        return False
    result.pooled.append(answer.token_ids)
    result.cached.append(answer.end.cached_tokens)
    return True
