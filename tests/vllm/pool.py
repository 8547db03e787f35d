"""A job: engines that share KV in a remote pool."""

from __future__ import annotations

import signal
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headrace_kv.tiers.tiers import TierSettings
from tests.pool_store import Store
from tests.vllm.pair import Pair, prompt_of, running_pair
from tests.waiting import until

PROMPT_TOKENS = 321
PROMPT_COUNT = 4
# A prompt has 10 full blocks. Decode has room for two prompts in KV memory and for one below.
KV_MEMORY_BLOCKS = 24
DECODE_HOST_BLOCKS = 14
PREFILL_HOST_BLOCKS = 60
NEW_TOKENS = 70
HASH_KEY = 5
# Longer than a call of a working store takes on a busy machine.
TIMEOUT_S = 20.0
SHARED_S = 120.0
_GIB = 1 << 30


@dataclass(slots=True)
class Result:
    """By prompt: the answers after a first prefill, and later ones of decode alone, once other prompts evicted it.

    `cached`: prompt tokens that decode did not compute. `foreign_cached`: the same for another tenant.
    `turn`: answers to a longer prompt, after a prefill and of decode alone. `turn_received`, `turn_prefill_cached`:
    its tokens that decode did not receive, and that prefill did not compute.
    `without`, `cached_without`: as `again` and `cached`, once the store is killed.
    """

    first: list[list[int]] = field(default_factory=list)
    again: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    foreign_cached: int = -1
    turn: list[list[int]] = field(default_factory=list)
    turn_received: int = -1
    turn_prefill_cached: int = -1
    without: list[list[int]] = field(default_factory=list)
    cached_without: list[int] = field(default_factory=list)


async def shared(model: str, size: int, block_bytes: int, stages: int) -> Result:
    """Prefill stores prompts in a pool, and both engines load them from there. Then the store is killed.

    Both engines have the tensor-parallel size `size`, and `stages`. `block_bytes`: of one block on all ranks.
    """

    def settings(address: str, host_blocks: int, *, publishes: bool) -> dict[str, object]:
        return {
            "model": model,
            "tensor_parallel_size": size,
            "pipeline_parallel_size": stages,
            "num_gpu_blocks_override": KV_MEMORY_BLOCKS,
            "max_model_len": 512,
            "tiers": TierSettings(
                host_gib=(host_blocks + 0.5) * block_bytes / (size * stages) / _GIB,
                pool_address=address,
                pool_timeout_s=TIMEOUT_S,
                publishes=publishes,
            ),
        }

    with tempfile.TemporaryDirectory(prefix="headrace-pool-") as folder:
        store = Store(Path(folder))
        try:
            await store.wait()
            async with running_pair(
                prefill=settings(store.address, PREFILL_HOST_BLOCKS, publishes=True),
                decode=settings(store.address, DECODE_HOST_BLOCKS, publishes=False),
            ) as pair:
                return await _shared(pair, store)
        finally:
            store.end()


async def _shared(pair: Pair, store: Store) -> Result:
    prompts = [prompt_of(PROMPT_TOKENS, seed) for seed in range(PROMPT_COUNT)]
    result = Result()
    for engine in (pair.prefill, pair.decode):
        engine.prefix_events.set_hash_key(HASH_KEY, "m")
    await until(partial(_are_shared, pair, prompts, result), SHARED_S)
    foreign = await pair.plain(prompts[0], cache_salt="another tenant")
    assert foreign.end is not None
    result.foreign_cached = foreign.end.cached_tokens
    # The last prompt is evicted by the time it is asked again.
    turn = prompts[-1] + prompt_of(NEW_TOKENS, PROMPT_COUNT)
    await until(partial(_is_continued, pair, turn, result), SHARED_S)
    store.signal(signal.SIGKILL)
    for prompt in prompts:
        answer = await pair.plain(prompt)
        assert answer.end is not None
        result.without.append(answer.token_ids)
        result.cached_without.append(answer.end.cached_tokens)
    await pair.reset()
    result.turn.append((await pair.plain(turn)).token_ids)
    return result


async def _are_shared(pair: Pair, prompts: list[list[int]], result: Result) -> bool:
    """Whether decode alone has loaded every prompt whole. Prefill offers its blocks to the pool at each attempt."""
    await until(pair.decode.reset_prefix_cache)
    handed = [await pair.split(prompt) for prompt in prompts]
    result.first = result.first or [answer.token_ids for answer in handed]
    answers = [await pair.plain(prompt) for prompt in prompts]
    result.again = [answer.token_ids for answer in answers]
    result.cached = [answer.end.cached_tokens for answer in answers if answer.end is not None]
    return result.cached == [PROMPT_TOKENS - 1] * len(prompts)


async def _is_continued(pair: Pair, turn: list[int], result: Result) -> bool:
    """Whether both engines, with nothing of their own, have loaded the beginning of a prompt."""
    for engine in (pair.prefill, pair.decode):
        await until(engine.reset_prefix_cache)
    answer = await pair.split(turn)
    if answer.reservation is None or answer.prefill is None:
        return False
    result.turn = [answer.token_ids]
    result.turn_received = answer.reservation.start_token
    result.turn_prefill_cached = answer.prefill.cached_tokens
    return result.turn_received == result.turn_prefill_cached == PROMPT_TOKENS - 1
