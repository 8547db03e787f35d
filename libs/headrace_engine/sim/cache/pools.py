"""The blocks and pages that requests hold, over all cache groups."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from math import lcm

import numpy as np

from headrace_engine.prefix.announcer import PrefixAnnouncer
from headrace_engine.sim.cache.announcements import Announcements
from headrace_engine.sim.cache.blocks import BlockPool
from headrace_engine.sim.cache.host_tier import Content, HostTier
from headrace_engine.sim.request.sequence import Sequence
from headrace_kv.layout.layout import STATE, CacheGroup
from headrace_kv.prefix.events import Tier


class CachePools:
    """One pool per group: a request gets all that it needs of every group, or nothing.

    `on_cleared(group, block_ids)` is told of blocks whose content is worth nothing any more,
    `prefix_events` of the blocks of the first group, which keeps tokens, that can be found. Those that
    have to leave go to `host`, of which a cache with one group only may have one.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        block_counts: tuple[int, ...],
        on_cleared: Callable[[int, Items[int]], None],
        prefix_events: PrefixAnnouncer,
        host: HostTier | None = None,
    ) -> None:
        self._groups = groups
        self._host = host
        self._announcements = Announcements(prefix_events)
        self._pools = tuple(
            BlockPool(
                count,
                partial(on_cleared, index),
                self._leave_memory if index == 0 else None,
            )
            for index, count in enumerate(block_counts)
        )
        self._keeps_state = any(group.kind == STATE for group in groups)
        self._span_tokens = lcm(*(group.block_tokens or 1 for group in groups))

    @property
    def available_count(self) -> int:
        """Blocks and pages that nobody holds."""
        return sum(pool.available_count for pool in self._pools)

    @property
    def held_count(self) -> int:
        """Blocks and pages that requests hold."""
        return sum(pool.count - pool.available_count for pool in self._pools)

    def forget(self) -> bool:
        """Gives up every known prefix of every group; False when a request holds blocks."""
        if self.held_count:
            return False
        for pool in self._pools:
            pool.forget()
        return True

    def free_ids_by_group(self) -> tuple[tuple[int, ...], ...]:
        """Blocks that hold nothing."""
        return tuple(pool.free_ids() for pool in self._pools)

    def place(self, sequence: Sequence) -> bool:
        """Gives a request its blocks, known ones first; False when there are too few."""
        placed = self._known_blocks(sequence)
        known_tokens = len(placed[0]) * self._groups[0].block_tokens
        kept = self._kept_blocks(sequence, known_tokens)
        for pool, block_ids in zip(self._pools, placed, strict=True):
            pool.hold(block_ids)
        for group, pool, block_ids in zip(self._groups, self._pools, placed, strict=True):
            fresh = pool.take(group.blocks_between(0, sequence.capacity) - len(block_ids))
            if fresh is None:
                for holding, given_up in zip(self._pools, placed, strict=True):
                    holding.release(given_up)
                return False
            block_ids.extend(fresh)
        sequence.block_ids_by_group = tuple(tuple(block_ids) for block_ids in placed)
        sequence.block_tables = tuple(np.asarray(block_ids, np.uint64) for block_ids in placed)
        sequence.copied = len(kept) * self._groups[0].block_tokens
        sequence.cached = sequence.computed = known_tokens + sequence.copied
        self._copy_back(sequence, known_tokens, kept)
        return True

    def _kept_blocks(self, sequence: Sequence, known_tokens: int) -> list[tuple[int, Content]]:
        """What main memory knows of the prompt after its first `known_tokens`."""
        if self._host is None:
            return []
        size = self._groups[0].block_tokens
        reusable = sequence.reusable_tokens(self._keeps_state)
        return self._host.known(sequence.prefixes(size, reusable)[known_tokens // size :])

    def _copy_back(
        self, sequence: Sequence, known_tokens: int, kept: Items[tuple[int, Content]]
    ) -> None:
        if self._host is None or not kept:
            return
        size = self._groups[0].block_tokens
        first = known_tokens // size
        block_ids = sequence.block_ids_by_group[0][first : first + len(kept)]
        for block, (_, content) in zip(block_ids, kept, strict=True):
            self._host.restore(block, content)
        self.publish(sequence, known_tokens, known_tokens + len(kept) * size)

    def _leave_memory(self, prefixes: Items[int], block_ids: Items[int]) -> None:
        """Blocks are needed for something else: main memory keeps what they hold, if there is some."""
        if self._host is not None:
            fresh = [prefix for prefix in prefixes if prefix not in self._host]
            given_up = self._host.keep(prefixes, block_ids)
            self._announcements.kept(fresh)
            self._announcements.forgotten(given_up, Tier.HOST)
        self._announcements.forgotten(prefixes)

    def _known_blocks(self, sequence: Sequence) -> list[list[int]]:
        """Blocks of the prompt's beginning that every group of tokens knows."""
        reusable = sequence.reusable_tokens(self._keeps_state)
        found: list[list[int]] = []
        for group, pool in zip(self._groups, self._pools, strict=True):
            known: list[int] = []
            if group.kind != STATE:
                known = pool.cached(sequence.prefixes(group.block_tokens, reusable))
                reusable = min(reusable, len(known) * group.block_tokens)
            found.append(known)
        reusable -= reusable % self._span_tokens
        return [
            known[: reusable // (group.block_tokens or 1)]
            for group, known in zip(self._groups, found, strict=True)
        ]

    def blocks_between(
        self, sequence: Sequence, start_token: int, end_token: int
    ) -> tuple[tuple[int, ...], ...]:
        """A request's blocks of tokens [start_token, end_token), and its page, by group.

        start_token begins a block of every group.
        """
        return tuple(
            block_ids
            if group.kind == STATE
            else block_ids[start_token // group.block_tokens : -(-end_token // group.block_tokens)]
            for group, block_ids in zip(self._groups, sequence.block_ids_by_group, strict=True)
        )

    def publish(self, sequence: Sequence, start_token: int, end_token: int) -> None:
        """Makes the blocks findable that tokens [start_token, end_token) completed."""
        for pool_index, (group, pool, block_ids) in enumerate(
            zip(self._groups, self._pools, sequence.block_ids_by_group, strict=True)
        ):
            if group.kind == STATE:
                continue
            size = group.block_tokens
            fresh = [
                index
                for index in range(start_token // size, end_token // size)
                if pool.publish(block_ids[index], int(sequence.hashes[(index + 1) * size - 1]))
            ]
            if pool_index == 0:
                self._announcements.stored(sequence, fresh)

    def release(self, sequence: Sequence) -> None:
        """Takes the request's hold from its blocks."""
        for pool, block_ids in zip(self._pools, sequence.block_ids_by_group, strict=False):
            pool.release(block_ids)
