"""The blocks and state pages that requests hold, over all cache groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from math import gcd, lcm

from headrace_common.callers.priority import Priority
from headrace_engine.connector.tier_planner import TierPlanner
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.sim.block_names import BlockNames
from headrace_engine.sim.sequence import Sequence
from headrace_kv.layout import STATE, CacheGroup
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.blocks import BlockPool, CachedBlock


@dataclass(slots=True)
class _CachedBlock:
    """A block that was reported, by its hash and its parent's, and the number of tiers that hold it."""

    block_hash: int
    parent: int | None
    tiers: int = 0

    def tier_added(self) -> None:
        """One more tier holds the block."""
        self.tiers += 1

    def tier_removed(self) -> None:
        """One tier no longer holds the block."""
        self.tiers -= 1


class CacheEventReporter:
    """Reports the cached blocks of one pool to `events`, from the time on when that has a hasher.

    A prefix is the engine's own hash of the salt and all tokens up to the end of a block.
    """

    def __init__(self, events: PrefixEventPublisher) -> None:
        self._events = events
        self._by_prefix: dict[int, _CachedBlock] = {}

    def blocks_named(self, names: BlockNames, prefixes: Items[int]) -> None:
        """Some of these blocks may be of the request's prompt, and have never been in KV memory."""
        unknown = set(prefixes) - self._by_prefix.keys()
        if unknown:
            size = self._events.block_tokens
            indices = range(len(names))
            self._blocks(names, [one for one in indices if names.at((one + 1) * size) in unknown])

    def blocks_cached(self, names: BlockNames, indices: Items[int]) -> None:
        """Blocks of the request, by ascending index, can be found in KV memory now."""
        for block in self._blocks(names, indices):
            block.tier_added()
            self._events.stored(block.parent, [block.block_hash])

    def _blocks(self, names: BlockNames, indices: Items[int]) -> list[_CachedBlock]:
        if not indices or self._events.hasher is None:
            return []
        hashes = names.published(indices[-1] + 1, self._events.hasher)
        found: list[_CachedBlock] = []
        for index in indices:
            block = _CachedBlock(hashes[index], hashes[index - 1] if index else None)
            prefix = names.at((index + 1) * self._events.block_tokens)
            found.append(self._by_prefix.setdefault(prefix, block))
        return found

    def blocks_offloaded(self, prefixes: Items[int], tier: Tier) -> None:
        """Cached blocks are in that tier too."""
        for prefix in prefixes:
            block = self._by_prefix.get(prefix)
            if block is not None:
                block.tier_added()
                self._events.stored(block.parent, [block.block_hash], tier)

    def blocks_evicted(self, prefixes: Items[int], tier: Tier = Tier.DEVICE) -> None:
        """Blocks can no longer be found in that tier."""
        evicted: list[int] = []
        for prefix in prefixes:
            block = self._by_prefix.get(prefix)
            if block is None:
                continue
            evicted.append(block.block_hash)
            block.tier_removed()
            if not block.tiers:
                del self._by_prefix[prefix]
        self._events.removed(evicted, tier)


class CachePools:
    """One pool per group. A request gets all that it needs of every group, or nothing.

    `on_cleared(group, block_ids)` gets blocks with void content. The cached blocks of the first
    group, which keeps tokens, are reported to `prefix_events`. Only a cache with a single group may have `tiers`.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        block_counts: tuple[int, ...],
        on_cleared: Callable[[int, Items[int]], None],
        prefix_events: PrefixEventPublisher,
        tiers: TierPlanner,
    ) -> None:
        self._groups = groups
        self.tiers = tiers
        """What is kept below KV memory."""
        self._found: list[list[int]] = []
        self._reporter = CacheEventReporter(prefix_events)
        self._pools = tuple(
            BlockPool(
                count,
                partial(on_cleared, index),
                self._report_evicted if index == 0 else None,
            )
            for index, count in enumerate(block_counts)
        )
        self._keeps_state = any(group.kind == STATE for group in groups)
        sizes = [group.block_tokens or 1 for group in groups]
        self._span_tokens = lcm(*sizes)
        self.stride_tokens = gcd(*(group.block_tokens for group in groups)) or self._span_tokens
        """A block ends only at a multiple of it."""

    @property
    def available_count(self) -> int:
        """Blocks and pages that no request holds."""
        return sum(pool.available_count for pool in self._pools)

    @property
    def held_count(self) -> int:
        """Blocks and pages that requests hold."""
        return sum(pool.count - pool.available_count for pool in self._pools)

    def reset_cache(self) -> bool:
        """Evicts every cached prefix of every group; False when a request holds blocks."""
        if self.held_count:
            return False
        for pool in self._pools:
            pool.evict_idle()
        self.tiers.clear()
        self.report_changes(())
        return True

    def _report_evicted(self, evicted: Items[CachedBlock]) -> None:
        self._reporter.blocks_evicted([one.prefix for one in evicted])

    def find(self, sequence: Sequence) -> int | None:
        """The number of tokens that tiers have after those that are cached. None while some are on their way there.

        `allocate` must follow at once.
        """
        self._found = self._cached_blocks(sequence)
        cached = len(self._found[0]) * self._groups[0].block_tokens
        reusable = sequence.reusable_tokens(self._keeps_state)
        return self.tiers.find(sequence.transfer_id, cached, reusable)

    def allocate(self, sequence: Sequence) -> bool:
        """Gives a request its blocks, cached ones first; False when there are too few."""
        block_ids_by_group = self._found
        cached_tokens = len(block_ids_by_group[0]) * self._groups[0].block_tokens
        for pool, block_ids in zip(self._pools, block_ids_by_group, strict=True):
            pool.share(block_ids, sequence.priority)
        for group, pool, block_ids in zip(
            self._groups, self._pools, block_ids_by_group, strict=True
        ):
            fresh = pool.allocate(group.blocks_between(0, sequence.capacity) - len(block_ids))
            if fresh is None:
                self.release(block_ids_by_group)
                return False
            block_ids.extend(fresh)
        sequence.blocks_allocated(tuple(map(tuple, block_ids_by_group)), cached_tokens)
        return True

    def _cached_blocks(self, sequence: Sequence) -> list[list[int]]:
        """Blocks of the longest prefix of the prompt that every group of tokens has cached."""
        reusable = sequence.reusable_tokens(self._keeps_state)
        found: list[list[int]] = []
        for group, pool in zip(self._groups, self._pools, strict=True):
            cached: list[int] = []
            if group.kind != STATE:
                cached = pool.find_cached(sequence.names.prefixes(group.block_tokens, reusable))
                reusable = min(reusable, len(cached) * group.block_tokens)
            found.append(cached)
        reusable -= reusable % self._span_tokens
        return [
            cached[: reusable // (group.block_tokens or 1)]
            for group, cached in zip(self._groups, found, strict=True)
        ]

    def register(self, sequence: Sequence, start_token: int, end_token: int) -> None:
        """Caches the blocks that tokens [start_token, end_token) completed."""
        for pool_index, (group, pool, block_ids) in enumerate(
            zip(self._groups, self._pools, sequence.block_ids_by_group, strict=True)
        ):
            if group.kind == STATE:
                continue
            size = group.block_tokens
            if start_token // size == end_token // size:
                continue
            cached = [
                index
                for index in range(start_token // size, end_token // size)
                if pool.register(
                    block_ids[index], sequence.names.at((index + 1) * size), sequence.priority
                )
            ]
            if pool_index == 0:
                self._reporter.blocks_cached(sequence.names, cached)

    def report_changes(self, waiting: Iterable[Sequence]) -> None:
        """Reports what tiers have stored and evicted. Blocks may have been fetched for `waiting` requests."""
        for change in self.tiers.take_changes():
            prefixes = [int.from_bytes(one, "big") for one in change.block_hashes]
            if not change.stored:
                self._reporter.blocks_evicted(prefixes, change.tier)
                continue
            if change.tier == Tier.HOST:
                for sequence in waiting:
                    self._reporter.blocks_named(sequence.names, prefixes)
            self._reporter.blocks_offloaded(prefixes, change.tier)

    def hold(self, block_ids_by_group: Items[Items[int]]) -> None:
        """Adds a holder to blocks that requests hold."""
        for pool, block_ids in zip(self._pools, block_ids_by_group, strict=False):
            pool.share(block_ids, Priority.LOW)

    def release(self, block_ids_by_group: Items[Items[int]]) -> None:
        """Takes a hold from blocks."""
        for pool, block_ids in zip(self._pools, block_ids_by_group, strict=False):
            pool.free(block_ids)
