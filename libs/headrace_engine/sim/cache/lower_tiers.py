"""Blocks of a sim engine's KV memory that are also kept in main memory, on disk and in a remote pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from headrace_common.callers.priority import Priority
from headrace_common.errors import TransferFailed
from headrace_engine.connector.host_sends import HostSends
from headrace_engine.sim.cache.cache_events import CacheEventReporter
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory
from headrace_kv.manager.block_pool import CachedBlock
from headrace_kv.manager.load_times import LoadTimes, TierLoad
from headrace_kv.manager.lower_tiers import (
    LowerTiers,
    PoolBlocks,
    TierCopy,
    TierHit,
    TierPlan,
    TierSettings,
)
from headrace_kv.manager.promises import Promises
from headrace_kv.pool.engine_blocks import BlockLookup, PoolKeys, RankBlocks
from headrace_kv.pool.memory import PoolMemory
from headrace_kv.pool.remote import RemotePool, leading
from headrace_kv.prefix.events import Tier
from headrace_kv.storage.host import block_bytes_of
from headrace_kv.storage.tier_copier import TierCopier

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
            count = await asyncio.wrap_future(found) if found is not None else 0
            if count:
                await self._move(wanted[:count], due_s, on_fetched)
        finally:
            self._tiers.release(hit)
            for prefix in mine:
                del self._fetches[prefix]

    async def _move(self, found: Sequence[int], due_s: float, on_fetched: Report) -> None:
        """Fetches consecutive prefixes."""
        blocks, plan = self._tiers.reserve(found)
        self._carry_out(plan)
        whole = 0
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            left_s = due_s - start_s
            reads = [
                _result(rank.fetch(blocks.prefixes, blocks.block_ids, left_s))
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


_logger = logging.getLogger(__name__)


class SimLowerTiers:
    """Makes each planned copy at once, on all ranks. The changes go to `reporter`.

    A load counts as longer by `load_s_per_block` for each block, which is the simulated time of its copy. Blocks that a
    failed copy should have read or written below KV memory are forgotten.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        copiers: Sequence[TierCopier],
        settings: TierSettings,
        load_s_per_block: float,
        promises: Promises,
    ) -> None:
        self._tiers = tiers
        self.promises = promises
        """What stays in the tiers for a time."""
        self.host_sends = HostSends(tiers, len(copiers), enabled=settings.sends_from_host)
        """What transfers read straight from main memory."""
        self._copiers = copiers
        self._settings = settings
        self._load_s_per_block = load_s_per_block
        self.load_times = LoadTimes()
        self._remote: SimRemoteBlocks | None = None

    @property
    def names(self) -> tuple[Tier, ...]:
        """The tiers, from the fastest to the slowest."""
        return self._tiers.names

    @property
    def writes_through(self) -> bool:
        """Whether blocks are stored as soon as they are cached, not only when they are evicted."""
        return self._settings.pooled and self._settings.publishes

    @property
    def host_memories(self) -> list[RankMemory]:
        """Blocks in main memory of each rank, for transfers."""
        return [copier.host_memory for copier in self._copiers]

    @property
    def pool_memories(self) -> list[PoolMemory]:
        """Main memory of each rank, for a remote pool."""
        return [copier.pool_memory for copier in self._copiers]

    def attach(
        self, pool: RemotePool, secret: bytes, layout: KvLayout, reporter: CacheEventReporter
    ) -> None:
        """Uses a pool over `pool_memories` from now on."""
        self._remote = SimRemoteBlocks(
            self._tiers,
            pool,
            PoolKeys(secret, layout),
            self._settings.pool_timeout_s,
            lambda plan: self._carry_out(plan, reporter),
            partial(self._loaded, reporter=reporter),
        )

    def fetch(
        self,
        prefixes: Sequence[int],
        on_fetched: Callable[[Sequence[int]], None],
        on_end: Callable[[], None],
    ) -> bool:
        """See SimRemoteBlocks.fetch."""
        return self._remote is not None and self._remote.fetch(prefixes, on_fetched, on_end)

    def pool_lost(self, reporter: CacheEventReporter) -> None:
        """The pool's store may have lost its blocks."""
        if self._remote is not None:
            self._remote.lost(reporter)

    def store(self, offered: Sequence[CachedBlock], reporter: CacheEventReporter) -> None:
        """Copies blocks out of KV memory, parents first. Those that are new in main memory go to the pool too."""
        self.promises.expire()
        plan = self._tiers.store(offered)
        self._carry_out(plan, reporter)
        if self._remote is not None and self._settings.publishes:
            for change in plan.changes:
                if change.stored and change.tier == Tier.HOST:
                    self._remote.publish(change.prefixes, reporter)

    def hold(self, prefixes: Sequence[int], priority: Priority) -> TierHit:
        """See LowerTiers.hold."""
        return self._tiers.hold(prefixes, priority)

    def release(self, hit: TierHit) -> None:
        """Ends a hold without a load."""
        self._tiers.release(hit)

    def load(self, hit: TierHit, block_ids: Sequence[int], reporter: CacheEventReporter) -> int:
        """Copies held blocks into KV memory. Returns how many of the first ones are there."""
        plan = self._tiers.load(hit, block_ids)
        failed = self._copy(plan, lambda load: self._loaded(load, reporter))
        for copy in failed:
            self._report(self._tiers.drop(copy.source, copy.source_ids), reporter)
            self.promises.blocks_lost()
        lost = {copy.source for copy in failed}
        whole = (index for index, (tier, _) in enumerate(hit.blocks) if tier in lost)
        return next(whole, len(hit))

    def clear(self, reporter: CacheEventReporter) -> None:
        """Forgets every block. The pool keeps its own, which are announced no longer."""
        self.promises.end_all()
        self._report(self._tiers.clear(), reporter)
        self._report(TierPlan(changes=self.host_sends.clear()), reporter)
        self.pool_lost(reporter)

    async def close(self) -> None:
        """Frees files, and leaves the pool."""
        if self._remote is not None:
            await self._remote.close()
        for copier in self._copiers:
            copier.close()

    def _carry_out(self, plan: TierPlan, reporter: CacheEventReporter) -> None:
        """Makes copies to lower tiers."""
        failed = self._copy(plan)
        self._report(plan, reporter)
        for copy in failed:
            self._report(self._tiers.drop(copy.destination, copy.destination_ids), reporter)
            self.promises.blocks_lost()

    def _copy(
        self, plan: TierPlan, on_load: Callable[[TierLoad], None] = lambda _: None
    ) -> list[TierCopy]:
        """Makes the copies of a plan. Returns those that failed. `on_load` gets the loads into KV memory."""
        failed: list[TierCopy] = []
        for copy in plan.copies:
            start_s, count = time.monotonic(), len(copy.source_ids)
            is_load = copy.destination == Tier.DEVICE
            try:
                for copier in self._copiers:
                    copier.copy(copy)
                copy_s = time.monotonic() - start_s
            except TransferFailed as error:
                _logger.warning(
                    "a copy from %s to %s: %s",
                    copy.source.name,
                    copy.destination.name,
                    error.detail,
                )
                failed.append(copy)
                if is_load:
                    on_load(TierLoad(copy.source, count, 0.0, failed=True))
                continue
            if is_load:
                on_load(TierLoad(copy.source, count, copy_s + count * self._load_s_per_block))
        return failed

    def _loaded(self, load: TierLoad, reporter: CacheEventReporter) -> None:
        self.load_times.record(load)
        seconds_per_block = self.load_times.seconds_per_block(load.tier)
        if seconds_per_block is not None:
            reporter.blocks_loaded(load.tier, seconds_per_block)

    def _report(self, plan: TierPlan, reporter: CacheEventReporter) -> None:
        for change in plan.changes:
            report: Callable[[Sequence[int], Tier], None] = (
                reporter.blocks_offloaded if change.stored else reporter.blocks_evicted
            )
            report(change.prefixes, change.tier)


def open_lower_tiers(
    descriptor: KvDescriptor,
    settings: TierSettings,
    host_blocks: int,
    disk_blocks: int,
    load_s_per_block: float,
    clock: Callable[[], float] = time.monotonic,
) -> SimLowerTiers | None:
    """The tiers below the memory that `descriptor` describes; None for none.

    The counts of blocks apply where `settings` have no tier. `load_s_per_block`: see SimLowerTiers. Raises ConfigError
    for a model with several caches.
    """
    counts = {Tier.HOST: host_blocks, Tier.DISK: disk_blocks}
    if settings.names:
        block_bytes = block_bytes_of(descriptor.layout, 0, pooled=settings.pooled)
        counts = dict(settings.block_counts(block_bytes))
    counts = {tier: count for tier, count in counts.items() if count}
    if not counts:
        return None
    copiers = [
        TierCopier(
            descriptor.layout,
            memory,
            host_blocks=counts[Tier.HOST],
            disk_blocks=counts.get(Tier.DISK, 0),
            disk_folder=Path(settings.disk_folder),
            pooled=settings.pooled,
        )
        for memory in descriptor.ranks
    ]
    tiers = LowerTiers(counts)
    promises = Promises(tiers, descriptor.layout.block_tokens, settings.promised_share, clock)
    return SimLowerTiers(tiers, copiers, settings, load_s_per_block, promises)
