"""The engines that tiers are timed on: ours with each tier, plain vLLM, and vLLM with tiers of its own."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench.support.vllm_child import Child, engine, loaded
from bench.support.vllm_ways import CONTEXT_TOKENS, bytes_of_block, engine_arguments
from bench.tiers.peers import TierPeer, lmcache, offloading
from bench.tiers.report import Turn
from headrace_common.deadlines import Deadline
from headrace_common.errors import StaleIncarnation
from headrace_engine.interface import DecodeEnded, DecodeTokens, DecodeWork
from headrace_engine.vllm.engine import VllmEngine
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.tiers.load_times import TierLoad
from headrace_kv.tiers.tiers import TierSettings
from tests.decoding import decoded
from tests.pool_store import Store
from tests.vllm.pair import GREEDY, engine_config
from tests.waiting import until

BLOCK_TOKENS: Final = 32
ANSWER_TOKENS: Final = 16
MEMORY_BLOCKS: Final = 72
HOST_BLOCKS: Final = 140
# LMCache evicts a fifth of its main memory as soon as 0.8 is full.
LMCACHE_BLOCKS: Final = 210
DISK_BLOCKS: Final = 400
POOL_GIB: Final = 2.0
POOL_TIMEOUT_S: Final = 5.0
TIMEOUT_S: Final = 120.0
_GIB: Final = 1 << 30


class MeasuredEngine(VllmEngine):
    """Keeps the loads that its ranks report."""

    loads: list[TierLoad]

    def tier_loaded(self, load: TierLoad, rank: int = 0) -> None:
        super().tier_loaded(load, rank)
        self.loads.append(load)


class Ours:
    """Our engine, which answers prompts without a prefill worker."""

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)

    async def answer(self, prompt: list[int]) -> Turn:
        """Answers a turn, after all loads of earlier ones were reported."""
        self._engine.loads = []
        work = DecodeWork(
            f"x{next(self._numbers):032d}",
            tuple(prompt),
            replace(GREEDY, max_tokens=ANSWER_TOKENS),
            remote_kv=False,
        )
        token_ids: list[int] = []
        token_s: list[float] = []
        cached = 0
        start_s = time.monotonic()
        async with asyncio.timeout(TIMEOUT_S):
            async for event in decoded(self._engine, work):
                if isinstance(event, DecodeTokens):
                    token_s += [time.monotonic() - start_s] * len(event.token_ids)
                    token_ids += event.token_ids
                elif isinstance(event, DecodeEnded):
                    cached = event.cached_tokens
        return Turn(tuple(token_s), tuple(token_ids), cached, tuple(self._engine.loads))

    async def forget(self) -> None:
        """Empties all tiers."""
        await until(self._engine.reset_prefix_cache)


@dataclass(frozen=True, slots=True)
class Engines:
    """All that run. `block_bytes`: of the KV of a block."""

    ours: Ours
    plain: Child
    peers: Sequence[TierPeer]
    block_bytes: int


async def answer_by_vllm(child: Child, prompt: list[int], count: int = ANSWER_TOKENS) -> Turn:
    """The same without our code. `count`: tokens of the answer."""
    token_ids: list[int] = []
    token_s: list[float] = []
    cached = 0
    start_s = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        async for piece in child.generate(prompt, count):
            cached = piece.cached_tokens
            token_s += [time.monotonic() - start_s] * len(piece.token_ids)
            token_ids += piece.token_ids
    return Turn(tuple(token_s), tuple(token_ids), cached)


@asynccontextmanager
async def running_store(folder: Path) -> AsyncIterator[str]:
    """A remote pool. Gives its address."""
    store = Store(folder, memory_gib=POOL_GIB)
    try:
        await store.wait()
        yield store.address
    finally:
        store.end()


@asynccontextmanager
async def engines(
    model: Path, dtype: str, folder: Path, pool: str, packages: Path | None
) -> AsyncIterator[Engines]:
    """Starts ours, then plain vLLM, then the peers with tiers. `packages`: those of LMCache."""
    block_bytes = bytes_of_block(model, dtype, BLOCK_TOKENS)
    config = engine_config(
        "decode",
        model=str(model),
        dtype=dtype,
        num_gpu_blocks_override=MEMORY_BLOCKS,
        block_size=BLOCK_TOKENS,
        max_model_len=CONTEXT_TOKENS,
        max_num_batched_tokens=2048,
        tiers=TierSettings(
            (HOST_BLOCKS + 0.5) * block_bytes / _GIB,
            (DISK_BLOCKS + 0.5) * block_bytes / _GIB,
            pool_address=pool,
            pool_timeout_s=POOL_TIMEOUT_S,
            publishes=bool(pool),
        ),
    )

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        raise StaleIncarnation(f"{ref} is not here")

    ours = MeasuredEngine(config, descriptors)
    ours.loads = []
    plain = engine_arguments(
        *(model, dtype, 4 * 1024),
        num_gpu_blocks_override=4 * 1024 // BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
    )
    small = plain | {"num_gpu_blocks_override": MEMORY_BLOCKS}
    try:
        ours.launch()
        async with AsyncExitStack() as stack:
            child = await stack.enter_async_context(engine(plain, folder / "vllm.log"))
            await ours.attach()
            ours.prefix_events.set_hash_key(1, model.name)
            await loaded(child)
            peers = [
                await stack.enter_async_context(
                    offloading(small, HOST_BLOCKS * block_bytes, folder)
                )
            ]
            if packages is not None:
                started = lmcache(small, LMCACHE_BLOCKS * block_bytes, folder, packages=packages)
                peers.append(await stack.enter_async_context(started))
            await loaded(*(peer.child for peer in peers))
            yield Engines(Ours(ours), child, peers, block_bytes)
    finally:
        await ours.close()
