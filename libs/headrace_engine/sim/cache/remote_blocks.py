"""What a sim engine fetches from a remote pool before a request runs, and what it stores there."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

from headrace_common.callers.priority import Priority
from headrace_engine.sim.cache.cache_events import CacheEventReporter
from headrace_kv.manager.load_times import TierLoad
from headrace_kv.manager.lower_tiers import LowerTiers, PoolBlocks, TierPlan
from headrace_kv.pool.engine_blocks import BlockLookup, PoolKeys, RankBlocks
from headrace_kv.pool.remote import RemotePool, leading
from headrace_kv.prefix.events import Tier

PUBLISH_TIMEOUT_S: Final = 10.0
UNPUBLISHED_MAX: Final = 256
"""Blocks that are being stored in the pool. Further ones are not stored."""
ANNOUNCED_MAX: Final = 65_536
FETCH_BLOCKS_MAX: Final = 512
_BATCH_BLOCKS: Final = 32

Report = Callable[[Sequence[int]], None]


class SimRemoteBlocks:
    """Moves blocks between the tier HOST and a pool. One event loop owns it. `carry_out` makes a plan's copies.
    `on_load` gets each fetch that has brought blocks.

    A fetch ends in time whatever the store does. Blocks that did not come are computed.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        pool: RemotePool,
        keys: PoolKeys,
        timeout_s: float,
        carry_out: Callable[[TierPlan], None],
        on_load: Callable[[TierLoad], None],
    ) -> None:
        self._tiers = tiers
        self._pool = pool
        self._lookup = BlockLookup(pool, keys)
        # Memory i of the pool is that of rank i.
        ranks = range(keys.layout.rank_count)
        self._ranks = [RankBlocks(pool, keys, rank, memory=rank) for rank in ranks]
        self._timeout_s = timeout_s
        self._carry_out = carry_out
        self._on_load = on_load
        self._tasks: set[asyncio.Task[None]] = set()
        # The fetch of each prefix that is under way.
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._unpublished = 0
        # Prefixes that this worker has stored, the oldest first.
        self._published: OrderedDict[int, None] = OrderedDict()

    def fetch(
        self, prefixes: Sequence[int], on_fetched: Report, on_end: Callable[[], None]
    ) -> bool:
        """Fetches those of consecutive prefixes that are in no tier, up to the first that the pool lacks.

        Returns whether it begins. `on_fetched` gets the fetched ones; `on_end` is called in any case then.
        """
        if not self._pool.is_open or all(prefix in self._tiers for prefix in prefixes):
            return False
        task = asyncio.create_task(self._fetch(prefixes, on_fetched))
        self._tasks.add(task)

        def end(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            # The request runs also after an error, which the event loop reports.
            on_end()
            if not ended.cancelled():
                ended.result()

        task.add_done_callback(end)
        return True

    async def _fetch(self, prefixes: Sequence[int], on_fetched: Report) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._timeout_s
        other = next((self._fetches[one] for one in prefixes if one in self._fetches), None)
        if other is not None:
            await asyncio.wait({other}, timeout=self._timeout_s)
        # The blocks before must not be evicted for those behind them.
        hit = self._tiers.hold(prefixes, Priority.LOW)
        task = asyncio.current_task()
        assert task is not None
        wanted = prefixes[len(hit) :][:FETCH_BLOCKS_MAX]
        mine = [prefix for prefix in wanted if prefix not in self._fetches]
        self._fetches.update(dict.fromkeys(mine, task))
        try:
            found = self._lookup.find(wanted, due_s - loop.time())
            shard_counts = await asyncio.wrap_future(found) if found is not None else ()
            if shard_counts:
                saved = dict(zip(wanted, shard_counts, strict=False))
                await self._move(saved, due_s, on_fetched)
        finally:
            self._tiers.release(hit)
            for prefix in mine:
                del self._fetches[prefix]

    async def _move(self, saved: Mapping[int, int], due_s: float, on_fetched: Report) -> None:
        """Fetches consecutive prefixes. `saved`: in how many shards each was saved."""
        blocks, plan = self._tiers.reserve(saved)
        self._carry_out(plan)
        shard_counts = [saved[prefix] for prefix in blocks.prefixes]
        whole = 0
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            left_s = due_s - start_s
            reads = [
                _result(rank.fetch(blocks.prefixes, blocks.block_ids, shard_counts, left_s))
                for rank in self._ranks
            ]
            whole = min(leading(read) for read in await asyncio.gather(*reads))
        finally:
            fetched = self._tiers.fetched(blocks, whole)
            self._on_load(TierLoad(Tier.REMOTE, whole, loop.time() - start_s))
            for change in fetched.changes:
                on_fetched(change.prefixes)

    def publish(self, prefixes: Sequence[int], reporter: CacheEventReporter) -> None:
        """Stores blocks of the tier HOST in the pool, as far as it keeps up."""
        if not self._pool.is_open:
            return
        for start in range(0, len(prefixes), _BATCH_BLOCKS):
            if self._unpublished >= UNPUBLISHED_MAX:
                return
            blocks = self._tiers.hold_fastest(prefixes[start : start + _BATCH_BLOCKS])
            task = asyncio.create_task(self._publish(blocks, reporter))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _publish(self, blocks: PoolBlocks, reporter: CacheEventReporter) -> None:
        self._unpublished += len(blocks)
        try:
            writes = [
                _result(rank.store(blocks.prefixes, blocks.block_ids, PUBLISH_TIMEOUT_S))
                for rank in self._ranks
            ]
            done = await asyncio.gather(*writes)
        finally:
            self._unpublished -= len(blocks)
            self._tiers.release_fastest(blocks)
        stored = [
            prefix
            for prefix, *by_rank in zip(blocks.prefixes, *done, strict=True)
            if all(by_rank) and prefix not in self._published
        ]
        self._published.update(dict.fromkeys(stored))
        reporter.blocks_offloaded(stored, Tier.REMOTE)
        while len(self._published) > ANNOUNCED_MAX:
            oldest, _ = self._published.popitem(last=False)
            reporter.blocks_evicted([oldest], Tier.REMOTE)

    def lost(self, reporter: CacheEventReporter) -> None:
        """The store may have lost its blocks."""
        gone, self._published = list(self._published), OrderedDict()
        reporter.blocks_evicted(gone, Tier.REMOTE)

    async def close(self) -> None:
        """Ends the pool, and everything that waits for it."""
        await asyncio.to_thread(self._pool.close)
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _result(future: Future[list[bool]]) -> list[bool]:
    return await asyncio.wrap_future(future)
