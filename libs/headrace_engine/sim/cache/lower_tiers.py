"""Blocks that a sim engine has evicted from its KV memory, kept in main memory and on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace_engine.sim.cache.cache_events import CacheEventReporter
from headrace_kv.layout.layout import KvDescriptor
from headrace_kv.manager.lower_tiers import LowerTiers, TierHit, TierPlan
from headrace_kv.manager.settings import TierSettings
from headrace_kv.prefix.events import Tier
from headrace_kv.storage.host import HostStorage
from headrace_kv.storage.tier_copier import TierCopier


class SimLowerTiers:
    """Makes each planned copy at once, on all ranks. The changes go to `reporter`."""

    def __init__(self, tiers: LowerTiers, copiers: Sequence[TierCopier]) -> None:
        self._tiers = tiers
        self._copiers = copiers

    @property
    def names(self) -> tuple[Tier, ...]:
        """The tiers, from the fastest to the slowest."""
        return self._tiers.names

    def store(
        self, prefixes: Sequence[int], block_ids: Sequence[int], reporter: CacheEventReporter
    ) -> None:
        """Copies blocks out of KV memory, parents first."""
        self._carry_out(self._tiers.store(prefixes, block_ids), reporter)

    def hold(self, prefixes: Sequence[int]) -> TierHit:
        """The longest run of `prefixes` that is here. Later evictions do not take it away."""
        return self._tiers.hold(prefixes)

    def release(self, hit: TierHit) -> None:
        """Ends a hold without a load."""
        self._tiers.release(hit)

    def load(self, hit: TierHit, block_ids: Sequence[int], reporter: CacheEventReporter) -> None:
        """Copies held blocks into KV memory."""
        self._carry_out(self._tiers.load(hit, block_ids), reporter)

    def clear(self, reporter: CacheEventReporter) -> None:
        """Forgets every block."""
        self._carry_out(self._tiers.clear(), reporter)

    def close(self) -> None:
        """Frees files."""
        for copier in self._copiers:
            copier.close()

    def _carry_out(self, plan: TierPlan, reporter: CacheEventReporter) -> None:
        for copy in plan.copies:
            for copier in self._copiers:
                copier.copy(copy)
        for change in plan.changes:
            report: Callable[[Sequence[int], Tier], None] = (
                reporter.blocks_offloaded if change.stored else reporter.blocks_evicted
            )
            report(change.prefixes, change.tier)


def open_lower_tiers(
    descriptor: KvDescriptor, settings: TierSettings, host_blocks: int, disk_blocks: int
) -> SimLowerTiers | None:
    """The tiers below the memory that `descriptor` describes; None for none.

    The counts of blocks apply where `settings` have no tier. Raises ConfigError for a model with several caches.
    """
    counts = {Tier.HOST: host_blocks, Tier.DISK: disk_blocks}
    if settings.names:
        one = HostStorage(descriptor.layout, 0, 1)
        counts = dict(settings.block_counts(one.block_bytes))
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
        )
        for memory in descriptor.ranks
    ]
    return SimLowerTiers(LowerTiers(counts, settings.min_uses), copiers)
