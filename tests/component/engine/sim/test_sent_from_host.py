"""Cached blocks in a prefill worker's main memory are sent from there, and stay there until they are sent (I2)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from headrace_common.errors import TransferFailed
from headrace_engine.interface import Arrived
from headrace_kv.copy_plan import Runs
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.blocks import CachedBlock
from headrace_kv.tiers.tiers import TierSettings
from headrace_kv.transport.base import KvTransport, WriteResult
from tests.component.engine.kv_event_workers import random_prompt
from tests.component.engine.sim.support import (
    GREEDY,
    Handed,
    Pair,
    Started,
    close,
    decode_work,
    hold_loads,
    host_blocks,
    pair,
    tokens_of,
)
from tests.in_memory_transport import InMemoryTransport
from tests.waiting import until

LAYERS = 3
MODEL = f"sim:layers={LAYERS},context=512"
HOST = host_blocks(60)
# Decode computes the last token. The others fill 10 blocks of 8.
WHOLE_TOKENS = 81
CACHED_TOKENS = 80
TAIL_TOKENS = 85
KV_BLOCKS = 16


class GatedTransport(InMemoryTransport):
    """Writes wait for `gate`, and fail if `fails`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = False
        self.fails = False

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        if self.fails:
            raise TransferFailed("the test wants it")
        self.waiting = not self.gate.is_set()
        self.gate.wait(timeout_s)
        return super().write(session, runs, timeout_s)


def opened(transports: list[GatedTransport]) -> KvTransport:
    """A new transport, also in the list."""
    transports.append(GatedTransport())
    return transports[-1]


@asynccontextmanager
async def small_pair(tiers: TierSettings = HOST, **changes: Any) -> AsyncIterator[Pair]:
    """A prefill engine with KV memory for one prompt, and main memory for several."""
    prefill = {"tiers": tiers, "num_gpu_blocks_override": KV_BLOCKS} | changes.pop("prefill", {})
    async with pair(model=MODEL, prefill=prefill, **changes) as both:
        yield both


async def evict(both: Pair, count: int = 2) -> None:
    """Lets other prompts take the prefill engine's KV memory, and empties decode's cache."""
    for number in range(count):
        name = f"other{number}"
        await both.generate(random_prompt(Random(name), WHOLE_TOKENS), transfer_id=name)
    assert await both.decode.reset_prefix_cache()


async def again(both: Pair, prompt: list[int]) -> Handed:
    """Sends a prompt, evicts it from prefill's KV memory, and sends it again. Both answers are right."""
    await both.generate(prompt, transfer_id="first")
    await evict(both)
    return await both.generate(prompt, transfer_id="second")


async def finish(both: Pair, started: Started, prompt: list[int]) -> None:
    """Reads a started request to its end. Its answer is right."""
    await started.transfer.wait()
    both.decode.transfer_event(Arrived(started.reservation.transfer_id))
    events = [event async for event in started.reader]
    assert tokens_of(events) == both.decode.model.expected_tokens(prompt, GREEDY.max_tokens)
    await started.prefill


def loaded_blocks(both: Pair) -> int:
    """Blocks that prefill has loaded from main memory."""
    return both.prefill.tier_loads.loaded_blocks().get(Tier.HOST, 0)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [({}, {}), ({"tensor_parallel_size": 2}, {}), ({}, {"tensor_parallel_size": 4})],
)
async def test_ranks_send_from_their_own_main_memory(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    prompt = random_prompt(Random(1), WHOLE_TOKENS)
    async with small_pair(prefill=prefill, decode=decode) as both:
        handed = await again(both, prompt)
        assert handed.outcome is not None
        assert handed.outcome.cached_tokens == CACHED_TOKENS
        assert handed.outcome.tier_tokens == {Tier.HOST: CACHED_TOKENS}


async def test_blocks_in_kv_memory_and_blocks_below_are_both_sent() -> None:
    prompt = random_prompt(Random(2), WHOLE_TOKENS)
    async with small_pair() as both:
        await both.generate(prompt, transfer_id="first")
        # The first blocks are the last ones to be evicted.
        await evict(both, count=1)
        handed = await both.generate(prompt, transfer_id="second")
        assert handed.outcome is not None
        below = handed.outcome.tier_tokens[Tier.HOST]
        assert 0 < below < CACHED_TOKENS
        assert handed.outcome.cached_tokens == CACHED_TOKENS


@pytest.mark.parametrize("tokens", [WHOLE_TOKENS, TAIL_TOKENS])
async def test_a_prompt_is_sent_before_it_is_loaded(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(Random(3), tokens)
    transports = list[GatedTransport]()
    async with small_pair(prefill_transports=lambda: opened(transports)) as both:
        await both.generate(prompt, transfer_id="first")
        await evict(both)
        go_on = hold_loads(monkeypatch)
        before = transports[0].write_count
        started = await both.start(decode_work(prompt, transfer_id="second", remote_kv=True))
        await until(lambda: transports[0].write_count == before + LAYERS)
        if tokens == TAIL_TOKENS:
            assert not started.prefill.done()
        go_on.set()
        await finish(both, started, prompt)
        assert started.prefill.result().tier_tokens == {Tier.HOST: CACHED_TOKENS}
        await until(lambda: loaded_blocks(both) == CACHED_TOKENS // 8)


async def test_blocks_stay_in_main_memory_while_a_write_may_read_them() -> None:
    prompt = random_prompt(Random(4), WHOLE_TOKENS)
    transports = list[GatedTransport]()
    # Main memory has room for two prompts.
    async with small_pair(
        tiers=host_blocks(20), prefill_transports=lambda: opened(transports)
    ) as both:
        await both.generate(prompt, transfer_id="first")
        await evict(both)
        transports[0].gate.clear()
        started = await both.start(decode_work(prompt, transfer_id="second", remote_kv=True))
        await until(lambda: transports[0].waiting)
        assert not await both.prefill.reset_prefix_cache()
        tiers = both.prefill._pools.tiers._tiers
        # More than main memory holds.
        for first in range(1000, 1040, KV_BLOCKS):
            others = [CachedBlock(first + block, block) for block in range(KV_BLOCKS)]
            tiers.store(others)
        transports[0].gate.set()
        await finish(both, started, prompt)


async def test_a_failed_transfer_ends_the_hold() -> None:
    prompt = random_prompt(Random(5), WHOLE_TOKENS)
    transports = list[GatedTransport]()
    async with small_pair(prefill_transports=lambda: opened(transports)) as both:
        await both.generate(prompt, transfer_id="first")
        await evict(both)
        transports[0].fails = True
        started = await both.start(decode_work(prompt, transfer_id="second", remote_kv=True))
        await asyncio.wait({started.prefill})
        assert started.prefill.exception() is not None
        await close(started.reader)
        # It is false while a request holds blocks of any tier.
        await until(both.prefill.reset_prefix_cache)
        with pytest.raises(TransferFailed):
            await started.transfer.wait()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_request_waits_for_its_transfer_and_for_the_load_of_every_rank(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(Random(7), WHOLE_TOKENS)
    decode = {"tiers": HOST, "num_gpu_blocks_override": KV_BLOCKS, "tensor_parallel_size": ranks}
    async with pair(model=MODEL, decode=decode) as both:
        for number in range(3):
            other = random_prompt(Random(f"other{number}"), WHOLE_TOKENS)
            await both.generate(other if number else prompt, transfer_id=f"x{number}")
        go_on = hold_loads(monkeypatch, *both.decode._copiers[1:])
        longer = [*prompt, *range(100, 117)]
        started = await both.start(decode_work(longer, transfer_id="longer", remote_kv=True))
        assert started.reservation.start_token == CACHED_TOKENS
        await started.transfer.wait()
        both.decode.transfer_event(Arrived("longer"))
        await asyncio.sleep(0.05)
        go_on.set()
        await finish(both, started, longer)
