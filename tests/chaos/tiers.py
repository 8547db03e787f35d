"""Faults of a chaos worker's tiers, and the search for blocks that are lost or counted twice."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace_engine.sim.engine import SimEngine
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.blocks import BlockPool
from headrace_kv.tiers.copier import DiskStorage, TierCopier
from headrace_kv.tiers.tiers import LowerTiers, PoolBlocks, TierCopy, TierPlan
from headrace_kv.transport.memory import PASSED, Bytes, Mark

Held = Sequence[tuple[Tier, int]]


def put(owner: Any, name: str, value: object) -> None:
    """Sets an attribute of a product's class or module. This is how the process differs from a real worker."""
    setattr(owner, name, value)


def count_copies(changes_disk: Callable[[], bool]) -> Counter[str]:
    """Counts the blocks that ranks copy from now on.

    `changes_disk` decides for each read from a disk whether a byte has changed there.
    """
    counts: Counter[str] = Counter()
    copy_blocks, read = TierCopier.copy, DiskStorage.read

    def counted(copier: TierCopier, copy: TierCopy, mark: Mark = PASSED) -> None:
        copy_blocks(copier, copy, mark)
        way = f"blocks from {copy.source.name} to {copy.destination.name}"
        counts[way] += len(copy.source_ids)

    def changed(disk: DiskStorage, block: int, target: Bytes) -> None:
        if changes_disk():
            counts["blocks changed on the disk"] += 1
            start = block * disk._block_bytes
            (byte,) = os.pread(disk._descriptor, 1, start)
            os.pwrite(disk._descriptor, bytes((byte ^ 1,)), start)
        read(disk, block, target)

    put(TierCopier, "copy", counted)
    put(DiskStorage, "read", changed)
    return counts


class TierHolds:
    """The holders that each block of this process's lower tiers should have: one for each hold without its end."""

    def __init__(self) -> None:
        self._holders: Counter[tuple[Tier, int]] = Counter()

    @property
    def count(self) -> int:
        """All holders of all blocks."""
        return self._holders.total()

    def of_tier(self, tier: Tier) -> Counter[int]:
        """The holders of a tier's held blocks."""
        return Counter(
            {
                block: count
                for (name, block), count in self._holders.items()
                if name == tier and count
            }
        )

    def install(self) -> None:
        """Counts from now on."""
        reserve = LowerTiers.reserve
        self._wrap_begin("hold", lambda _, hit: hit.blocks)
        self._wrap_end("release", lambda _, hit: hit.blocks)
        self._wrap_begin("hold_fastest", _fastest)
        self._wrap_end("release_fastest", _fastest)
        self._wrap_end("fetched", _fastest)

        def reserved(tiers: LowerTiers, prefixes: Iterable[int]) -> tuple[PoolBlocks, TierPlan]:
            blocks, plan = reserve(tiers, prefixes)
            self._holders.update(_fastest(tiers, blocks))
            return blocks, plan

        put(LowerTiers, "reserve", reserved)

    def _wrap_begin(self, name: str, blocks_of: Callable[[LowerTiers, Any], Held]) -> None:
        begin = getattr(LowerTiers, name)

        def begun(tiers: LowerTiers, prefixes: Iterable[int], *others: object) -> object:
            held = begin(tiers, prefixes, *others)
            self._holders.update(blocks_of(tiers, held))
            return held

        put(LowerTiers, name, begun)

    def _wrap_end(self, name: str, blocks_of: Callable[[LowerTiers, Any], Held]) -> None:
        end = getattr(LowerTiers, name)

        def ended(tiers: LowerTiers, held: object, *others: object) -> object:
            self._holders.subtract(blocks_of(tiers, held))
            return end(tiers, held, *others)

        put(LowerTiers, name, ended)


def held_file(reports: Path, process_id: int) -> Path:
    """The file in which a worker writes how often blocks of its lower tiers are held."""
    return reports / f"held-{process_id}.txt"


def _fastest(tiers: LowerTiers, blocks: PoolBlocks) -> Held:
    return [(tiers.names[0], block) for block in blocks.block_ids]


def unconserved_blocks(engine: SimEngine, holds: TierHolds) -> Iterator[str]:
    """A line for every pool with blocks that are not exactly one of free, cached and held.

    In KV memory, a block has as many holders as requests have it, or may still be written by a late sender. In lower
    tiers, it has as many as `holds` has.
    """
    if engine._scheduler is None:
        return
    for group, pool in enumerate(engine._pools._pools):
        holders: Counter[int] = Counter()
        for sequence in engine._scheduler._by_id.values():
            if sequence.block_ids_by_group:
                holders.update(sequence.block_ids_by_group[group])
        for held in engine._scheduler.planner.holds._held.values():
            holders.update(held[group])
        yield from _faults_of(f"KV memory, group {group}", pool, holders)
    for tier, tier_pool in engine._pools.tiers._tiers._pools.items():
        yield from _faults_of(tier.name, tier_pool, holds.of_tier(tier))


def _faults_of(name: str, pool: BlockPool, holders: Counter[int]) -> Iterator[str]:
    free, idle = set(pool.free_ids()), set(pool._idle)
    held = {block: count for block, count in enumerate(pool._holders) if count}
    if len(free) != pool._free.count:
        yield f"{name}: {len(free)} blocks are free, and it counts {pool._free.count}"
    if len(free) + len(idle) + len(held) != pool.count or free | idle | held.keys() != set(
        range(pool.count)
    ):
        yield f"{name}: {len(free)} free, {len(idle)} cached and {len(held)} held of {pool.count}"
    if held != holders:
        wrong = sorted(
            block for block in held.keys() | holders.keys() if held.get(block, 0) != holders[block]
        )
        yield f"{name}: blocks {wrong} have another number of holders than requests have them"
    prefix_of = {block: cached.prefix for block, cached in pool._cached.items()}
    if {block: prefix for prefix, block in pool._block_of.items()} != prefix_of:
        yield f"{name}: prefixes and blocks do not refer to each other"
    if not idle <= prefix_of.keys():
        yield f"{name}: blocks {sorted(idle - prefix_of.keys())} are cached without a prefix"
