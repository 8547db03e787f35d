"""A job: engines that keep KV in main memory and on disk."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace_common.callers.priority import Priority
from headrace_engine.interface import DecodeEnded, DecodeTokens
from headrace_engine.vllm.engine import VllmEngine
from headrace_kv.prefix.events import Tier, load_time_from_proto
from headrace_kv.tiers.promises import KeepTerms
from headrace_kv.tiers.tiers import TierSettings
from tests.decoding import decoded
from tests.sent_layers import sent_layers
from tests.vllm.pair import ENGINE_ARGS, GREEDY, Answer, Pair, prompt_of, running_pair
from tests.vllm.tier_storm import storm
from tests.waiting import until

PROMPT_TOKENS = 321
PROMPT_COUNT = 4
GIB_PER_BLOCK = 1 / 1024
# A prompt fills 10 blocks of KV memory, which has 23.
KV_MEMORY_BLOCKS = 24


@dataclass(slots=True)
class Result:
    """By prompt: the answer on an empty cache, and those after the prompt was evicted from KV memory.

    `cached`: prompt tokens that decode did not compute. `received`: those that it did not receive from prefill.
    `prefill_cached`: those that prefill did not compute. `sent`: the first tokens of what prefill sent.
    `scored`: the log probabilities of a prompt with all its KV in main memory or below, and on an empty cache.
    `load_times`: announced seconds a block, by tier.
    `preempted`: long answers side by side, and one by one.
    `after_low`: the cached tokens of a prompt after low requests for more blocks than main memory has.
    `storm`: see tier_storm, on engines with a disk. `promised`: see _promised.
    """

    first: list[list[int]] = field(default_factory=list)
    again: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    split: list[list[int]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    prefill_cached: list[int] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    blocks: dict[str, int] = field(default_factory=dict)
    load_times: dict[str, float] = field(default_factory=dict)
    scored: list[list[float]] = field(default_factory=list)
    after_reset: int = 0
    preempted: list[list[list[int]]] = field(default_factory=list)
    after_low: int = 0
    storm: dict[str, int] = field(default_factory=dict)
    promised: dict[str, object] = field(default_factory=dict)


async def conversations(
    model: str,
    tensor_parallel_size: int,
    stages: int,
    host_blocks: int,
    disk_blocks: int,
    engine_args: str = ENGINE_ARGS,
    has_storm: bool = True,
) -> Result:
    """Answers prompts in turn, so that each is evicted before it comes again. Then a storm, if there is a disk."""
    with tempfile.TemporaryDirectory() as folder:
        tiers = TierSettings(host_blocks * GIB_PER_BLOCK, disk_blocks * GIB_PER_BLOCK)
        changes: dict[str, object] = {
            "model": model,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": stages,
            "num_gpu_blocks_override": KV_MEMORY_BLOCKS,
            "max_model_len": 512,
            "tiers": tiers,
            "engine_args": engine_args,
        }
        decode = changes | {"tiers": replace(tiers, disk_folder=folder)}
        async with running_pair(prefill=changes, decode=decode) as pair:
            result = await _conversations(pair)
            if disk_blocks:
                result.promised = await _promised(pair)
                if has_storm:
                    result.storm = dict(await storm(pair, Path(folder)))
            else:
                result.after_low = await _after_low(pair, host_blocks)
            result.load_times = load_times(pair.decode)
    return result


async def _conversations(pair: Pair) -> Result:
    prompts = [prompt_of(PROMPT_TOKENS, seed) for seed in range(PROMPT_COUNT)]
    result = Result()
    pair.decode.prefix_events.set_hash_key(1, "m")
    for prompt in prompts:
        result.first.append((await pair.plain(prompt)).token_ids)
    for prompt in prompts:
        answer = await pair.plain(prompt)
        result.again.append(answer.token_ids)
        result.cached.append(_cached(answer))
    result.blocks = tier_blocks(pair.decode)
    result.scored = [await _scores(pair, prompts[0])]
    await until(pair.decode.reset_prefix_cache)
    result.after_reset = _cached(await pair.plain(prompts[-1]))
    await until(pair.decode.reset_prefix_cache)
    result.scored.append(await _scores(pair, prompts[0]))
    for _ in range(2):
        result.split, result.received, result.prefill_cached, result.sent = [], [], [], []
        await until(pair.decode.reset_prefix_cache)
        for prompt in prompts:
            await _split(pair, prompt, result)
    result.preempted = await _preempted(pair)
    return result


async def _scores(pair: Pair, prompt: list[int]) -> list[float]:
    """The log probabilities of the prompt's tokens. None of them may come from a cache."""
    work = pair.work(prompt, replace(GREEDY, max_tokens=2, prompt_logprobs=1), remote_kv=False)
    found: list[float] = []
    async for event in decoded(pair.decode, work):
        if isinstance(event, DecodeTokens):
            found += [entry.logprob for entry in event.prompt_logprobs]
        elif isinstance(event, DecodeEnded):
            assert event.cached_tokens == 0
    return found


async def _split(pair: Pair, prompt: list[int], result: Result) -> None:
    # Decode has the first half of the prompt, in KV memory or below.
    await pair.plain(prompt[: PROMPT_TOKENS // 2])
    answer = await pair.split(prompt)
    assert answer.reservation is not None
    assert answer.prefill is not None
    result.split.append(answer.token_ids)
    result.received.append(answer.reservation.start_token)
    result.prefill_cached.append(answer.prefill.cached_tokens)
    result.sent.append(
        sorted({one.times.start_token for one in sent_layers(answer.prefill.reports)})
    )


async def _preempted(pair: Pair) -> list[list[list[int]]]:
    """Three answers do not fit KV memory together."""
    prompts = [prompt_of(170, 100 + seed) for seed in range(3)]
    long = replace(GREEDY, max_tokens=200)
    together = await asyncio.gather(*(pair.plain(prompt, long) for prompt in prompts))
    await until(pair.decode.reset_prefix_cache)
    alone = [await pair.plain(prompt, long) for prompt in prompts]
    return [[answer.token_ids for answer in answers] for answers in (together, alone)]


async def _after_low(pair: Pair, host_blocks: int) -> int:
    await until(pair.decode.reset_prefix_cache)
    kept = prompt_of(PROMPT_TOKENS, 300)
    await pair.plain(kept)
    for seed in range(301, 302 + host_blocks // (PROMPT_TOKENS // 32)):
        low = pair.work(prompt_of(PROMPT_TOKENS, seed), remote_kv=False, priority=Priority.LOW)
        async for _ in decoded(pair.decode, low):
            pass
    return _cached(await pair.plain(kept))


async def _promised(pair: Pair) -> dict[str, object]:
    """What is promised of a prompt with its answer, and found after more other prompts than the tiers have room for.

    `unkept`: what is found of a prompt without a promise.
    """
    await until(pair.decode.reset_prefix_cache)
    prompt, unkept = prompt_of(PROMPT_TOKENS, 400), prompt_of(PROMPT_TOKENS, 401)
    work = pair.work(prompt, remote_kv=False)
    terms = KeepTerms(work.transfer_id, "0a", 3_600.0)
    answer = Answer()
    async for event in decoded(pair.decode, replace(work, keep=terms)):
        answer.take(event)
    await pair.plain(unkept)
    assert answer.end is not None
    assert answer.end.kept is not None
    found: dict[str, object] = {"kept": answer.end.kept.tokens, "tier": answer.end.kept.tier.name}
    for seed in range(402, 438):
        await pair.plain(prompt_of(PROMPT_TOKENS, seed))
    found["blocks"] = sum(pair.decode.promises.blocks.values())
    found["held"] = _cached(await pair.plain(prompt))
    found["unkept"] = _cached(await pair.plain(unkept))
    found["of another"] = await pair.decode.keep(replace(terms, owner="0b", seconds=0.0))
    renewed = await pair.decode.keep(replace(terms, seconds=60.0))
    found["renewed"] = None if renewed is None else renewed.tokens
    ended = await pair.decode.keep(replace(terms, seconds=0.0))
    found["ended"] = None if ended is None else ended.tokens
    found["no more"] = await pair.decode.keep(terms)
    # The next step releases the blocks.
    await pair.plain(prompt)
    await until(lambda: not any(pair.decode.promises.blocks.values()))
    found["broken"] = pair.decode.promises.broken
    return found


def _cached(answer: Answer) -> int:
    assert answer.end is not None
    return answer.end.cached_tokens


def tier_blocks(engine: VllmEngine) -> dict[str, int]:
    """Blocks that the engine announces, by tier and all faster ones."""
    counts = {
        Tier(event.tier): event.announced_count for event in engine.prefix_events.heartbeats()
    }
    return {tier.name: counts.get(tier, 0) for tier in Tier}


def load_times(engine: VllmEngine) -> dict[str, float]:
    """Seconds to load a block, as the engine announces them, by tier."""
    times = {
        Tier(event.tier).name: load_time_from_proto(event)
        for event in engine.prefix_events.heartbeats()
    }
    return {tier: load_s for tier, load_s in times.items() if load_s is not None}
