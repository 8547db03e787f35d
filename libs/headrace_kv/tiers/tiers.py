"""How much KV is kept below KV memory, and which blocks there hold which cached prefixes. Pure.

Plans copies, and makes none.
All copies of a rank are made in the order in which they were planned. Therefore a plan is in effect as soon as it is
returned: a later copy out of a block finds what an earlier copy put into it. Only blocks in KV memory, which others use
too, need their holders until their copies have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from headrace_common.callers.priority import Priority
from headrace_common.errors import ConfigError
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.blocks import BlockPool, CachedBlock

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The tiers of one rank: GiB in main memory, GiB on disk, and the folder of the file.

    Blocks reach the disk from main memory only.

    `pool_address`: host:port of the master of a remote pool; empty means none. A request waits `pool_timeout_s` for
    blocks of it at most. With `publishes`, blocks that are stored in main memory are stored there too.
    """

    host_gib: float = 0.0
    disk_gib: float = 0.0
    disk_folder: str = "/var/tmp"
    pool_address: str = ""
    pool_timeout_s: float = 1.0
    publishes: bool = False

    @property
    def pooled(self) -> bool:
        """Whether there is a remote pool."""
        return bool(self.pool_address)

    @property
    def names(self) -> tuple[Tier, ...]:
        """The tiers, from the fastest to the slowest."""
        sizes = {Tier.HOST: self.host_gib, Tier.DISK: self.disk_gib}
        return tuple(tier for tier, size_gib in sizes.items() if size_gib)

    @property
    def announced(self) -> tuple[Tier, ...]:
        """The tiers that an engine announces blocks of, with KV memory and the remote pool."""
        return (Tier.DEVICE, *self.names, *((Tier.REMOTE,) if self.pooled else ()))

    def block_counts(self, block_bytes: int) -> Mapping[Tier, int]:
        """Blocks of each tier. Raises ConfigError for a tier that is smaller than a block."""
        sizes = {
            Tier.HOST: ("kv_host_gib", self.host_gib),
            Tier.DISK: ("kv_disk_gib", self.disk_gib),
        }
        counts: dict[Tier, int] = {}
        for tier in self.names:
            setting, size_gib = sizes[tier]
            counts[tier] = int(size_gib * _GIB) // block_bytes
            if not counts[tier]:
                raise ConfigError(
                    f"{setting} is {size_gib:g}, but one block has {block_bytes / _GIB:.3g} GiB: raise it",
                    metadata={"field": setting},
                )
        return counts


@dataclass(frozen=True, slots=True)
class TierCopy:
    """Copies block `source_ids[i]` of one tier to block `destination_ids[i]` of another, on every rank."""

    source: Tier
    destination: Tier
    source_ids: tuple[int, ...]
    destination_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TierChange:
    """Prefixes that can be found in a tier from now on (`stored`), or no longer."""

    tier: Tier
    stored: bool
    prefixes: tuple[int, ...]


@dataclass(slots=True)
class TierPlan:
    """Copies, to be made in this order, and what they change, in the order in which it is announced."""

    copies: list[TierCopy] = field(default_factory=list)
    changes: list[TierChange] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierHit:
    """Blocks of consecutive prefixes, each in the fastest tier that has it. They are held until `LowerTiers.load`."""

    blocks: tuple[tuple[Tier, int], ...]

    def __len__(self) -> int:
        return len(self.blocks)

    def count_leading(self, tier: Tier) -> int:
        """How many blocks there are before the first of another tier."""
        others = (index for index, (name, _) in enumerate(self.blocks) if name != tier)
        return next(others, len(self.blocks))


@dataclass(frozen=True, slots=True)
class PoolBlocks:
    """Blocks of the fastest tier that a remote pool or a transfer uses, with their prefixes. They are held."""

    prefixes: tuple[int, ...]
    block_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prefixes)


class LowerTiers:
    """The tiers below KV memory, from the fastest to the slowest.

    A block that a tier evicts moves to the next tier, and out of the last one. Each tier evicts blocks of low requests
    first: see IdleBlocks. Prefixes that a tier holds are not stored twice.
    """

    def __init__(self, block_counts: Mapping[Tier, int]) -> None:
        # What an allocation evicts, parents first.
        self._evicted: list[CachedBlock] = []
        self._pools = {
            tier: BlockPool(count, lambda _: None, self._on_evicted)
            for tier, count in sorted(block_counts.items())
        }
        self.names = tuple(self._pools)
        """The tiers, from the fastest to the slowest."""

    def __contains__(self, prefix: int) -> bool:
        return self._find(prefix) is not None

    @property
    def sizes(self) -> dict[Tier, int]:
        """All blocks, by tier."""
        return {tier: pool.count for tier, pool in self._pools.items()}

    def has(self, prefix: int, tier: Tier, block: int) -> bool:
        """Whether a block of a tier has this prefix."""
        return self._pools[tier].find(prefix) == block

    def store(self, offered: Iterable[CachedBlock]) -> TierPlan:
        """Offers blocks of KV memory, parents first. The copies read these blocks."""
        plan = TierPlan()
        if self._pools:
            self._store(0, Tier.DEVICE, offered, plan)
        return plan

    def hold(self, prefixes: Iterable[int], priority: Priority = Priority.NORMAL) -> TierHit:
        """The longest run of `prefixes` that the tiers have, for a request of class `priority`.

        Its blocks stay until `load` or `release`.
        """
        found: list[tuple[Tier, int]] = []
        for prefix in prefixes:
            place = self._find(prefix)
            if place is None:
                break
            tier, block = place
            self._pools[tier].share([block], priority)
            found.append(place)
        return TierHit(tuple(found))

    def load(self, hit: TierHit, block_ids: Sequence[int]) -> TierPlan:
        """Copies held blocks into blocks of KV memory, of which there are as many, and releases them."""
        plan = TierPlan()
        for tier in self.names:
            chosen = [
                (held, block)
                for (name, held), block in zip(hit.blocks, block_ids, strict=True)
                if name == tier
            ]
            if chosen:
                sources, destinations = zip(*chosen, strict=True)
                plan.copies.append(TierCopy(tier, Tier.DEVICE, sources, destinations))
        self.release(hit)
        return plan

    def release(self, hit: TierHit) -> None:
        """Ends the hold on blocks. They count as used just now."""
        for tier, pool in self._pools.items():
            pool.free([block for name, block in hit.blocks if name == tier])

    def reserve(self, prefixes: Iterable[int]) -> tuple[PoolBlocks, TierPlan]:
        """Blocks for consecutive prefixes that a remote pool may have, as far as there is room, up to `fetched`.

        Their content is void, so they are not found before that.
        """
        plan = TierPlan()
        wanted = [prefix for prefix in prefixes if prefix not in self]
        chosen = wanted[: self._fastest.available_count]
        blocks, evicted = self._allocate(0, len(chosen))
        self._move_down(0, evicted, plan)
        return PoolBlocks(tuple(chosen), tuple(blocks)), plan

    def fetched(self, blocks: PoolBlocks, whole_count: int) -> TierPlan:
        """The first `whole_count` of the reserved blocks have their content. The others are free again.

        They have the lowest class until a request holds them.
        """
        kept = tuple(
            prefix
            for prefix, block in zip(blocks.prefixes[:whole_count], blocks.block_ids, strict=False)
            if self._fastest.register(block, prefix, Priority.LOW)
        )
        self._fastest.free(blocks.block_ids)
        return TierPlan(changes=[TierChange(self.names[0], True, kept)] if kept else [])

    def hold_fastest(self, prefixes: Iterable[int]) -> PoolBlocks:
        """Those of the prefixes that the fastest tier has. Their blocks stay until `release_fastest`."""
        found = {
            prefix: block
            for prefix in prefixes
            if (block := self._fastest.find(prefix)) is not None
        }
        self._fastest.share(tuple(found.values()), Priority.LOW)
        return PoolBlocks(tuple(found), tuple(found.values()))

    def release_fastest(self, blocks: PoolBlocks) -> None:
        """Ends the hold of `hold_fastest`."""
        self._fastest.free(blocks.block_ids)

    def drop(self, tier: Tier, block_ids: Iterable[int]) -> TierPlan:
        """Forgets blocks with lost content, for example after a failed copy."""
        prefixes = tuple(self._pools[tier].forget(block_ids))
        return TierPlan(changes=[TierChange(tier, False, prefixes)] if prefixes else [])

    def drop_loaded(self, hit: TierHit, prefixes: Sequence[int]) -> TierPlan:
        """Forgets the blocks of a load that has failed, which were those of `prefixes`.

        Blocks that have another prefix by now stay.
        """
        plan = TierPlan()
        for tier in self.names:
            lost = [
                block
                for (name, block), prefix in zip(hit.blocks, prefixes, strict=True)
                if name == tier and self.has(prefix, tier, block)
            ]
            plan.changes += self.drop(tier, lost).changes
        return plan

    def clear(self) -> TierPlan:
        """Forgets every block that is not held."""
        plan = TierPlan()
        for tier, pool in self._pools.items():
            pool.evict_idle()
            prefixes = tuple(one.prefix for one in self._take_evicted())
            if prefixes:
                plan.changes.append(TierChange(tier, False, prefixes))
        return plan

    @property
    def _fastest(self) -> BlockPool:
        return self._pools[self.names[0]]

    def _find(self, prefix: int) -> tuple[Tier, int] | None:
        """The fastest tier that has a prefix, and its block there."""
        for tier, pool in self._pools.items():
            block = pool.find(prefix)
            if block is not None:
                return tier, block
        return None

    def _store(
        self, index: int, source: Tier, offered: Iterable[CachedBlock], plan: TierPlan
    ) -> None:
        tier = self.names[index]
        pool = self._pools[tier]
        fresh: list[CachedBlock] = []
        used: list[int] = []
        for one in offered:
            present = pool.find(one.prefix)
            if present is None:
                fresh.append(one)
            else:
                pool.share([present], one.priority)
                used.append(present)
        pool.free(used)
        # A prefix is found only with its parents, so that the first ones are worth the most.
        fresh = fresh[: pool.available_count]
        if not fresh:
            return
        destinations, evicted = self._allocate(index, len(fresh))
        for one, block in zip(fresh, destinations, strict=True):
            pool.register(block, one.prefix, one.priority)
        pool.free(destinations)
        self._move_down(index, evicted, plan)
        sources = tuple(one.block for one in fresh)
        plan.copies.append(TierCopy(source, tier, sources, tuple(destinations)))
        plan.changes.append(TierChange(tier, True, tuple(one.prefix for one in fresh)))

    def _move_down(self, index: int, evicted: Sequence[CachedBlock], plan: TierPlan) -> None:
        """Offers what a tier has evicted to the next one."""
        if not evicted:
            return
        name = self.names[index]
        if index + 1 < len(self.names):
            self._store(index + 1, name, evicted, plan)
        plan.changes.append(TierChange(name, False, tuple(one.prefix for one in evicted)))

    def _allocate(self, index: int, count: int) -> tuple[list[int], list[CachedBlock]]:
        """Blocks without prefixes, of which there must be enough, and what was evicted for them."""
        blocks = self._pools[self.names[index]].allocate(count)
        assert blocks is not None
        return blocks, self._take_evicted()

    def _on_evicted(self, evicted: Sequence[CachedBlock]) -> None:
        # A pool evicts the children first.
        self._evicted += reversed(evicted)

    def _take_evicted(self) -> list[CachedBlock]:
        evicted, self._evicted = self._evicted, []
        return evicted
