"""The blocks and state pages that requests hold, over all cache groups."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from math import gcd, lcm

from headrace_common.callers.priority import Priority
from headrace_engine.connector.step_plan import StepPlan
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.sim.cache.cache_events import CacheEventReporter
from headrace_engine.sim.cache.lower_tiers import SimLowerTiers
from headrace_engine.sim.sequence import Sequence
from headrace_kv.layout import STATE, CacheGroup
from headrace_kv.manager.block_pool import BlockPool, CachedBlock
from headrace_kv.manager.lower_tiers import TierHit
from headrace_kv.manager.promises import KeepTerms, Kept
from headrace_kv.prefix.events import Tier


class CachePools:
    """One pool per group. A request gets all that it needs of every group, or nothing.

    `on_cleared(group, block_ids)` gets blocks with void content. The cached blocks of the first
    group, which keeps tokens, are reported to `prefix_events`. Evicted blocks go to `lower_tiers`, which
    only a cache with a single group may have.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        block_counts: tuple[int, ...],
        on_cleared: Callable[[int, Items[int]], None],
        prefix_events: PrefixEventPublisher,
        lower_tiers: SimLowerTiers | None = None,
    ) -> None:
        self._groups = groups
        self._lower_tiers = lower_tiers
        self._reporter = CacheEventReporter(prefix_events)
        self._pools = tuple(
            BlockPool(
                count,
                partial(on_cleared, index),
                self._offload if index == 0 else None,
            )
            for index, count in enumerate(block_counts)
        )
        self._keeps_state = any(group.kind == STATE for group in groups)
        sizes = [group.block_tokens or 1 for group in groups]
        self._span_tokens = lcm(*sizes)
        # A block ends only at a multiple of it.
        self._common_tokens = gcd(*(group.block_tokens for group in groups)) or self._span_tokens

    @property
    def keeps_state(self) -> bool:
        """Whether a request has a page of a state."""
        return self._keeps_state

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
        if self._lower_tiers is not None:
            self._lower_tiers.clear(self._reporter)
        return True

    @property
    def reporter(self) -> CacheEventReporter:
        """Where changes of the first group's cached blocks are reported."""
        return self._reporter

    def begin_fetch(self, sequence: Sequence, on_end: Callable[[], None]) -> bool:
        """Fetches what a request lacks from the remote pool. Returns whether it must wait until `on_end` is called."""
        if self._lower_tiers is None:
            return False
        size = self._groups[0].block_tokens
        prefixes = sequence.prefixes(size, sequence.reusable_tokens(self._keeps_state))
        missing = prefixes[len(self._pools[0].find_cached(prefixes)) :]
        index_of = {prefix: index for index, prefix in enumerate(prefixes)}

        def report(fetched: Items[int]) -> None:
            indices = [index_of[prefix] for prefix in fetched]
            sequence.blocks_fetched(indices)
            self._reporter.blocks_cached(sequence, indices, Tier.HOST)

        return self._lower_tiers.fetch(missing, report, on_end)

    def free_ids_by_group(self) -> tuple[tuple[int, ...], ...]:
        """Blocks with neither a holder nor a cached prefix."""
        return tuple(pool.free_ids() for pool in self._pools)

    def allocate(self, sequence: Sequence) -> bool:
        """Gives a request its blocks, cached ones first; False when there are too few."""
        block_ids_by_group = self._cached_blocks(sequence)
        size = self._groups[0].block_tokens
        first_loaded = len(block_ids_by_group[0])
        hit = self._lower_blocks(sequence, first_loaded)
        for pool, block_ids in zip(self._pools, block_ids_by_group, strict=True):
            pool.share(block_ids, sequence.priority)
        for group, pool, block_ids in zip(
            self._groups, self._pools, block_ids_by_group, strict=True
        ):
            fresh = pool.allocate(group.blocks_between(0, sequence.capacity) - len(block_ids))
            if fresh is None:
                for each, held in zip(self._pools, block_ids_by_group, strict=True):
                    each.free(held)
                if self._lower_tiers is not None:
                    self._lower_tiers.release(hit)
                return False
            block_ids.extend(fresh)
        loaded = self._load(hit, block_ids_by_group[0][first_loaded:])
        start, end = first_loaded * size, (first_loaded + loaded) * size
        sequence.blocks_allocated(
            tuple(tuple(block_ids) for block_ids in block_ids_by_group),
            cached_tokens=end,
            loaded_tokens=end - start,
            tier_tokens=self._tier_tokens(sequence, hit, first_loaded, loaded),
        )
        if loaded:
            self.register(sequence, start, end)
        return True

    def _lower_blocks(self, sequence: Sequence, start_block: int) -> TierHit:
        """The prompt's blocks from `start_block` on that are in lower tiers. They are held."""
        if self._lower_tiers is None:
            return TierHit(())
        size = self._groups[0].block_tokens
        reusable = sequence.reusable_tokens(self._keeps_state)
        prefixes = sequence.prefixes(size, reusable)[start_block:]
        return self._lower_tiers.hold(prefixes, sequence.priority)

    def send_from_host(self, sequence: Sequence, transfer_id: str, start_token: int) -> int:
        """See HostSends. Sends the cached tokens of a request from main memory, as far as they are there."""
        if self._lower_tiers is None:
            return start_token
        size = self._groups[0].block_tokens
        first = start_token // size
        prefixes = sequence.prefixes(size, sequence.cached)[first:]
        return self._lower_tiers.host_sends.send(transfer_id, start_token, first, prefixes, size, 0)

    def add_to(self, plan: StepPlan) -> None:
        """Adds what is sent from main memory from the next step on."""
        if self._lower_tiers is not None:
            self._lower_tiers.host_sends.add_to(plan)

    def host_sends_ended(self, numbers: Items[int]) -> None:
        """Ranks have ended sends from main memory."""
        if self._lower_tiers is not None:
            self._lower_tiers.host_sends.ended(numbers)

    def _tier_tokens(
        self, sequence: Sequence, hit: TierHit, first: int, count: int
    ) -> dict[Tier, int]:
        """Tokens of `count` loaded blocks from block `first` on, by the tier that they came from."""
        found: dict[Tier, int] = {}
        for index, (tier, _) in enumerate(hit.blocks[:count], first):
            origin = Tier.REMOTE if index in sequence.fetched else tier
            found[origin] = found.get(origin, 0) + self._groups[0].block_tokens
        return found

    def _load(self, hit: TierHit, block_ids: Items[int]) -> int:
        """Copies blocks of lower tiers into the first of `block_ids`. Returns how many are there."""
        if self._lower_tiers is None or not hit:
            return 0
        return self._lower_tiers.load(hit, block_ids[: len(hit)], self._reporter)

    def _offload(self, evicted: Items[CachedBlock]) -> None:
        """Copies evicted blocks to lower tiers, if there are any, and reports the changes."""
        if self._lower_tiers is not None:
            # The pool evicts the children first.
            self._lower_tiers.store(evicted[::-1], self._reporter)
        self._reporter.blocks_evicted([one.prefix for one in evicted])

    def _cached_blocks(self, sequence: Sequence) -> list[list[int]]:
        """Blocks of the longest prefix of the prompt that every group of tokens has cached."""
        reusable = sequence.reusable_tokens(self._keeps_state)
        found: list[list[int]] = []
        for group, pool in zip(self._groups, self._pools, strict=True):
            cached: list[int] = []
            if group.kind != STATE:
                cached = pool.find_cached(sequence.prefixes(group.block_tokens, reusable))
                reusable = min(reusable, len(cached) * group.block_tokens)
            found.append(cached)
        reusable -= reusable % self._span_tokens
        return [
            cached[: reusable // (group.block_tokens or 1)]
            for group, cached in zip(self._groups, found, strict=True)
        ]

    def register(self, sequence: Sequence, start_token: int, end_token: int) -> None:
        """Caches the blocks that tokens [start_token, end_token) completed."""
        if start_token // self._common_tokens == end_token // self._common_tokens:
            return
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
                    block_ids[index], sequence.prefix_at((index + 1) * size), sequence.priority
                )
            ]
            if pool_index == 0:
                self._reporter.blocks_cached(sequence, cached)
                self._write_through(sequence, cached)

    def _write_through(self, sequence: Sequence, indices: Items[int]) -> None:
        """Stores newly cached blocks in lower tiers, where these do not wait for evictions."""
        if self._lower_tiers is None or not self._lower_tiers.writes_through or not indices:
            return
        size = self._groups[0].block_tokens
        block_ids = sequence.block_ids_by_group[0]
        offered = [
            CachedBlock(sequence.prefix_at((index + 1) * size), block_ids[index], sequence.priority)
            for index in indices
        ]
        self._lower_tiers.store(offered, self._reporter)

    def keep(self, sequence: Sequence, terms: KeepTerms) -> Kept | None:
        """Stores what a request has computed in lower tiers, and promises it. None without tiers."""
        if self._lower_tiers is None:
            return None
        size = self._groups[0].block_tokens
        prefixes = sequence.prefixes(size, sequence.computed)
        blocks = zip(prefixes, sequence.block_ids_by_group[0], strict=False)
        offered = [CachedBlock(prefix, block, sequence.priority) for prefix, block in blocks]
        self._lower_tiers.store(offered, self._reporter)
        return self._lower_tiers.promises.keep(terms, prefixes)

    def free(self, sequence: Sequence) -> None:
        """Takes the request's hold from its blocks."""
        self.release(sequence.block_ids_by_group)

    def hold(self, block_ids_by_group: Items[Items[int]]) -> None:
        """Adds a holder to blocks that requests hold."""
        for pool, block_ids in zip(self._pools, block_ids_by_group, strict=False):
            pool.share(block_ids, Priority.LOW)

    def release(self, block_ids_by_group: Items[Items[int]]) -> None:
        """Takes a hold from blocks."""
        for pool, block_ids in zip(self._pools, block_ids_by_group, strict=False):
            pool.free(block_ids)
