"""Blocks of a sim engine's KV memory that are also kept in main memory, on disk and in a remote pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from headrace_common.callers.priority import Priority
from headrace_common.errors import TransferFailed
from headrace_engine.sim.cache.cache_events import CacheEventReporter
from headrace_engine.sim.cache.remote_blocks import SimRemoteBlocks
from headrace_kv.layout.layout import KvDescriptor, KvLayout, RankMemory
from headrace_kv.manager.block_pool import CachedBlock
from headrace_kv.manager.load_times import LoadTimes, TierLoad
from headrace_kv.manager.lower_tiers import (
    NO_BLOCKS,
    LowerTiers,
    PoolBlocks,
    TierCopy,
    TierHit,
    TierPlan,
    TierSettings,
)
from headrace_kv.pool.engine_blocks import PoolKeys
from headrace_kv.pool.memory import PoolMemory
from headrace_kv.pool.remote import RemotePool
from headrace_kv.prefix.events import Tier
from headrace_kv.storage.host import block_bytes_of
from headrace_kv.storage.tier_copier import TierCopier

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
    ) -> None:
        self._tiers = tiers
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

    def hold_sent(self, prefixes: Sequence[int], hit: TierHit) -> PoolBlocks:
        """Holds those first blocks of a hit that transfers may read from main memory, until `sent`."""
        if not self._settings.sends_from_host:
            return NO_BLOCKS
        return self._tiers.hold_fastest(prefixes[: hit.count_leading(Tier.HOST)])

    def sent(self, blocks: PoolBlocks) -> None:
        """No transfer reads these blocks any more."""
        self._tiers.release_fastest(blocks)

    def load(self, hit: TierHit, block_ids: Sequence[int], reporter: CacheEventReporter) -> int:
        """Copies held blocks into KV memory. Returns how many of the first ones are there."""
        plan = self._tiers.load(hit, block_ids)
        failed = self._copy(plan, lambda load: self._loaded(load, reporter))
        for copy in failed:
            self._report(self._tiers.drop(copy.source, copy.source_ids), reporter)
        lost = {copy.source for copy in failed}
        whole = (index for index, (tier, _) in enumerate(hit.blocks) if tier in lost)
        return next(whole, len(hit))

    def clear(self, reporter: CacheEventReporter) -> None:
        """Forgets every block. The pool keeps its own, which are announced no longer."""
        self._report(self._tiers.clear(), reporter)
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
                    *(copy.source.name, copy.destination.name, error.detail),
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
    return SimLowerTiers(LowerTiers(counts, settings.min_uses), copiers, settings, load_s_per_block)
