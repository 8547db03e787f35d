"""Sim engines that share blocks in a remote pool. Whatever its store does, answers are right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest

from headrace_engine.interface import Sampling
from headrace_engine.sim.engine import SimEngine
from headrace_kv.tiers.pool import PoolOpener, RemotePool
from headrace_kv.tiers.pool_process import PoolMemory
from headrace_kv.tiers.tiers import TierSettings
from tests.component.engine.kv_event_workers import random_prompt
from tests.component.engine.sim.support import check_answer, decode_engine, decode_work
from tests.memory_pool import InMemoryPool, MemoryStore
from tests.waiting import until

PROMPT_TOKENS = 80
# The last token of a prompt is never reused, and a block has 8.
REUSED_TOKENS = 72
GREEDY = Sampling(temperature=0.0, max_tokens=3)
HASH_KEY = 77
LONG_S = 20.0
SHORT_S = 0.05


def tiers(*, publishes: bool = True, timeout_s: float = LONG_S) -> TierSettings:
    """A few hundred blocks in main memory, and a pool."""
    return TierSettings(
        host_gib=0.001,
        pool_address="127.0.0.1:1",
        pool_timeout_s=timeout_s,
        publishes=publishes,
    )


def open_pool_of(engine: SimEngine, hash_key: int = HASH_KEY) -> None:
    """Gives a worker the deployment's key, as its registration does."""
    engine.prefix_events.set_hash_key(hash_key, "sim")


def opener(store: MemoryStore, opened: list[InMemoryPool] | None = None) -> PoolOpener:
    """Opens pools over one store."""

    def open_pool(
        memories: Sequence[PoolMemory], secret: bytes, on_lost: Callable[[], None]
    ) -> RemotePool:
        pool = InMemoryPool(store, memories, secret, on_lost)
        if opened is not None:
            opened.append(pool)
        return pool

    return open_pool


async def answer(
    engine: SimEngine, prompt: list[int], name: str = "x", cache_salt: str = ""
) -> int:
    """Checks the answer. Returns how many tokens of the prompt were cached."""
    work = decode_work(prompt, GREEDY, transfer_id=name, cache_salt=cache_salt)
    return (await check_answer(engine, work)).cached_tokens


async def cached_by_another(
    store: MemoryStore,
    prompt: list[int],
    *,
    cache_salt: str = "",
    hash_key: int = HASH_KEY,
    **changes: Any,
) -> int:
    """How many tokens of a prompt a new worker finds. Its answer is right."""
    async with decode_engine(
        pools=opener(store), tiers=tiers(publishes=False), **changes
    ) as engine:
        open_pool_of(engine, hash_key)
        return await answer(engine, prompt, cache_salt=cache_salt)


async def publish(
    store: MemoryStore, prompt: list[int], cache_salt: str = "", **changes: Any
) -> None:
    """Lets a worker compute a prompt, and waits until its blocks are in the store."""
    async with decode_engine(pools=opener(store), tiers=tiers(), **changes) as engine:
        open_pool_of(engine)
        before = len(store.objects)
        await answer(engine, prompt, cache_salt=cache_salt)
        await until(lambda: len(store.objects) == before + len(prompt) // 8)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.thaw()


@pytest.fixture
def prompt() -> list[int]:
    return random_prompt(Random(5), PROMPT_TOKENS)


async def test_only_workers_of_the_same_tenant_layout_and_deployment_find_a_block(
    store: MemoryStore, prompt: list[int]
) -> None:
    await publish(store, prompt, cache_salt="aa")
    assert await cached_by_another(store, prompt, cache_salt="aa") == REUSED_TOKENS
    assert await cached_by_another(store, prompt, cache_salt="bb") == 0
    assert await cached_by_another(store, prompt) == 0
    other = "sim:layers=6,context=512"
    assert await cached_by_another(store, prompt, cache_salt="aa", model=other) == 0
    assert await cached_by_another(store, prompt, cache_salt="aa", hash_key=HASH_KEY + 1) == 0


async def test_wrong_bytes_are_computed_again(store: MemoryStore, prompt: list[int]) -> None:
    await publish(store, prompt)
    broken = list(store.objects)[4]

    def change(key: str, content: bytes) -> bytes:
        return content[:20] + b"\xa5" + content[21:] if key == broken else content

    store.change_reads(change)
    # Blocks are stored parents first: the fifth is broken, and those behind it are of no use.
    assert await cached_by_another(store, prompt) == 4 * 8
    assert broken not in store.objects


async def test_a_frozen_store_delays_one_request_and_no_further_one(
    store: MemoryStore, prompt: list[int]
) -> None:
    await publish(store, prompt)
    opened: list[InMemoryPool] = []
    settings = tiers(publishes=True, timeout_s=SHORT_S)
    async with decode_engine(pools=opener(store, opened), tiers=settings) as engine:
        open_pool_of(engine)
        (pool,) = opened
        store.freeze()
        assert await answer(engine, prompt, "a") == 0
        assert not pool.is_open
        other = random_prompt(Random(8), PROMPT_TOKENS)
        assert await answer(engine, other, "b") == 0


async def test_a_waiting_request_does_not_hold_up_others(
    store: MemoryStore, prompt: list[int]
) -> None:
    # Longer than the other request may take.
    settings = tiers(publishes=False, timeout_s=10 * LONG_S)
    async with decode_engine(pools=opener(store), tiers=settings) as engine:
        open_pool_of(engine)
        store.freeze()
        waiting = asyncio.create_task(answer(engine, prompt, "a"))
        await until(lambda: engine.usage().waiting_requests == 1)
        # Shorter than a block, so that the pool is not asked.
        async with asyncio.timeout(LONG_S):
            await answer(engine, [1, 2, 3], "b")
        assert not waiting.done()
        store.thaw()
        assert await waiting == 0


async def test_random_prompts_over_workers_that_share_a_pool(store: MemoryStore) -> None:
    random = Random(11)
    beginnings = [random_prompt(random, random.randrange(20, 100)) for _ in range(4)]
    cached = 0
    small = TierSettings(
        host_gib=16 * 4096 / 2**30,
        pool_address="127.0.0.1:1",
        pool_timeout_s=LONG_S,
        publishes=True,
    )
    async with (
        decode_engine(pools=opener(store), tiers=small, num_gpu_blocks_override=40) as first,
        decode_engine(pools=opener(store), tiers=small, num_gpu_blocks_override=40) as second,
    ):
        for engine in (first, second):
            open_pool_of(engine)
        for number in range(30):
            beginning = random.choice(beginnings)
            prompts = [
                beginning[: random.randrange(1, len(beginning))] + random_prompt(random, 20)
                for _ in range(3)
            ]
            engine = random.choice((first, second))
            cached += sum(
                await asyncio.gather(
                    *(answer(engine, one, f"{number}-{i}") for i, one in enumerate(prompts))
                )
            )
    assert cached > 0
    assert store.objects
