"""Reports the sim engine's cached blocks under the hashes that routers compute."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.sim.block_names import BlockNames
from headrace_kv.prefix.events import Tier


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
