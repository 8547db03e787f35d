"""Which worker holds which prefix blocks. Pure; one event loop owns it.

Every worker announces prefix-closed sets in numbered events. What is lost, doubled or out of order shows as a gap in
the numbers or as a digest that differs, and is repaired by a replay or a snapshot. Until then a worker keeps the credit
for what it last announced, unless `suspend` or a wrong digest takes it away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import InternalError
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.events import KvEvent, Tier, unpack_hashes
from headrace_kv.prefix.hashing import PromptHashes
from headrace_router.prefix_cache.block_table import PrefixTable
from headrace_router.prefix_cache.lookup import Depths
from headrace_router.prefix_cache.worker_bits import SlotPool
from headrace_router.prefix_cache.worker_state import SnapshotBuffer, TierDigest, WorkerCacheState

BLOCKS_MAX: Final = 16_000_000
SLOTS_MAX: Final = 4_096
SWEEP_BLOCKS: Final = 4_096


class ApplyResult(Enum):
    """What became of an event."""

    APPLIED = "applied"
    IGNORED = "ignored"
    """It was known already, or is another incarnation's."""
    NEEDS_RESYNC = "needs_resync"
    """Subscribe again, from `resume_after`."""


class PrefixIndex:
    """The union of all workers' announced sets.

    Each tier keeps at most `blocks_max` blocks; a worker whose blocks do not fit is credited for those that did, until
    there is room again. A worker's bit changes whenever a snapshot replaces its set: masks are valid until the next
    change of `generation`. While `change_count` stays, so does every answer.
    """

    def __init__(self, blocks_max: int = BLOCKS_MAX, slots_max: int = SLOTS_MAX) -> None:
        self.generation = 0
        self.refused_count = 0
        self.resync_count = 0
        self.change_count = 0
        # A list, because an enumeration's members are slow keys.
        self._tables = [PrefixTable(blocks_max) for _ in range(max(Tier) + 1)]
        self._blocks_max = blocks_max
        self._slots = SlotPool(slots_max)
        self._feeds: dict[WorkerRef, WorkerCacheState] = {}
        # Bits that lookups may report.
        self._live = 0
        # Retired bits that the pass under way clears.
        self._sweeping = 0
        self._handlers: dict[str, Callable[[WorkerCacheState, KvEvent], ApplyResult]] = {
            "stored": self._store,
            "removed": self._remove,
            "snapshot": self._fill,
            "cleared": self._clear,
            "heartbeat": self._check,
        }

    @property
    def block_count(self) -> int:
        """Distinct blocks, each tier's counted apart."""
        return sum(map(len, self._tables))

    @property
    def hole_count(self) -> int:
        """Lookups that met a hole in some worker's set and went block by block."""
        return sum(table.hole_count for table in self._tables)

    def memory_bytes(self) -> int:
        """What the blocks take, by the interpreter's own accounts."""
        return sum(table.memory_bytes() for table in self._tables)

    def add_worker(self, ref: WorkerRef) -> int:
        """The worker's slot. It gets no credit before its first snapshot is whole."""
        if ref in self._feeds:
            raise InternalError(f"{ref} is in the prefix index already")
        feed = WorkerCacheState(ref, SnapshotBuffer(self._take_slot(ref), 0))
        self._feeds[ref] = feed
        self.generation += 1
        return feed.current.slot

    def remove_worker(self, ref: WorkerRef) -> None:
        """Nobody gets credit for it from now on. Its blocks go with later sweeps."""
        feed = self._feeds.pop(ref, None)
        if feed is not None:
            self._retire(feed.current)
            if feed.next is not None:
                self._retire(feed.next)

    def suspend(self, ref: WorkerRef) -> None:
        """No credit until its set is known again: its stream has been silent for too long."""
        feed = self._feeds.get(ref)
        if feed is not None:
            self.change_count += 1
            self._live &= ~feed.current.bit

    def resume_after(self, ref: WorkerRef) -> int:
        """`since_sequence` for the next subscription; 0 asks for a snapshot."""
        feed = self._feeds[ref]
        return 0 if feed.broken else feed.current.sequence

    def mask(self, refs: Iterable[WorkerRef]) -> int:
        """The bits of these workers; those unknown have none."""
        feeds = (self._feeds.get(ref) for ref in refs)
        return sum({feed.current.bit for feed in feeds if feed is not None})

    def refs(self, mask: int) -> tuple[WorkerRef, ...]:
        """The workers of a mask that `find` returned."""
        return self._slots.refs(mask)

    def slots(self, mask: int) -> NDArray[np.intp]:
        """Where `blocks` has these workers, in the order of `refs`."""
        return self._slots.slots(mask)

    def find(self, hashes: Sequence[int], candidates: int = -1, tier: Tier = Tier.DEVICE) -> Depths:
        """How many of these blocks, from the first on, each worker of the mask holds; those with none are left out.

        Depths come in no order.
        """
        return self._tables[tier].find(hashes, candidates & self._live)

    def find_prompt(
        self, prompt: PromptHashes, candidates: int = -1, tier: Tier = Tier.DEVICE
    ) -> Depths:
        """The same of a prompt, hashing no further than any worker's blocks reach (and up to as far again)."""
        return self._tables[tier].find_prompt(prompt, candidates & self._live)

    def scores(self, depths: Depths) -> dict[WorkerRef, int]:
        """The same by worker."""
        return self._slots.scored(depths)

    def blocks(self, depths: Depths) -> NDArray[np.float64]:
        """The same by slot, 0 where `depths` says nothing. Shape [slot]; `slots` tells which are whose."""
        return self._slots.blocks(depths)

    def apply(self, ref: WorkerRef, event: KvEvent) -> ApplyResult:
        """Takes one message of the worker's stream, in whatever order it came."""
        feed = self._feeds.get(ref)
        if feed is None or event.incarnation != ref.incarnation:
            return ApplyResult.IGNORED
        self.change_count += 1
        return self._handlers[event.kind](feed, event)

    def sweep(self, budget: int = SWEEP_BLOCKS) -> bool:
        """Clears retired bits from up to `budget` blocks. Returns whether there is more to do.

        A pass begins by listing every block, which takes a few milliseconds per million.
        """
        if not self._sweeping:
            if not self._slots.retired:
                return False
            self._sweeping = self._slots.retired
            for table in self._tables:
                table.start_sweep()
        for table in self._tables:
            budget -= table.sweep(self._sweeping, budget) if budget > 0 else 0
        if budget > 0:
            self._slots.reclaim(self._sweeping)
            self._sweeping = 0
        return bool(self._slots.retired)

    def _store(self, feed: WorkerCacheState, event: KvEvent) -> ApplyResult:
        current = feed.current
        verdict = self._in_order(feed, event)
        if verdict is not None:
            return verdict
        current.sequence = event.sequence
        if current.truncated:
            self.refused_count += len(event.packed) >> 3
            return ApplyResult.APPLIED
        holding = current.holding(event.tier)
        self._add(current, holding, event)
        return self._count_checked(feed, holding, event)

    def _remove(self, feed: WorkerCacheState, event: KvEvent) -> ApplyResult:
        current = feed.current
        verdict = self._in_order(feed, event)
        if verdict is not None:
            return verdict
        current.sequence = event.sequence
        holding = current.holding(event.tier)
        dropped = self._tables[event.tier].drop(current.bit, unpack_hashes(event.packed))
        holding.changed(event.packed, -dropped)
        return self._count_checked(feed, holding, event)

    def _clear(self, feed: WorkerCacheState, event: KvEvent) -> ApplyResult:
        if event.sequence <= feed.current.sequence:
            return ApplyResult.IGNORED
        # Whatever was lost before it, an empty set is an empty set.
        if feed.next is not None:
            self._retire(feed.next)
        feed.next = SnapshotBuffer(self._take_slot(feed.ref), event.sequence)
        self._replace(feed, feed.next)
        return ApplyResult.APPLIED

    def _fill(self, feed: WorkerCacheState, event: KvEvent) -> ApplyResult:
        if event.sequence < feed.current.sequence:
            return ApplyResult.IGNORED
        filling = feed.next
        if filling is None or filling.sequence != event.sequence:
            if filling is not None:
                self._retire(filling)
            filling = feed.next = SnapshotBuffer(self._take_slot(feed.ref), event.sequence)
        filling.expected[event.tier] = event
        self._add(filling, filling.holding(event.tier), event)
        if not event.last:
            return ApplyResult.APPLIED
        if not filling.complete():
            return self._needs_resync()
        self._replace(feed, filling)
        return ApplyResult.APPLIED

    def _check(self, feed: WorkerCacheState, event: KvEvent) -> ApplyResult:
        current = feed.current
        if event.sequence < current.sequence:
            return ApplyResult.IGNORED
        if feed.broken or event.sequence > current.sequence:
            return self._needs_resync()
        if current.truncated:
            if max(map(len, self._tables)) * 10 < self._blocks_max * 9:
                feed.broken = True
                return self._needs_resync()
            self._live |= current.bit
            return ApplyResult.APPLIED
        if not current.holding(event.tier).matches(event):
            return self._differs(feed)
        self._live |= current.bit
        return ApplyResult.APPLIED

    def _in_order(self, feed: WorkerCacheState, event: KvEvent) -> ApplyResult | None:
        """None when the event is the next one."""
        if event.sequence <= feed.current.sequence:
            return ApplyResult.IGNORED
        if feed.broken or event.sequence != feed.current.sequence + 1:
            return self._needs_resync()
        return None

    def _add(self, filling: SnapshotBuffer, holding: TierDigest, event: KvEvent) -> None:
        """Once something did not fit, nothing more is added: what is there stays prefix-closed."""
        if filling.truncated:
            self.refused_count += len(event.packed) >> 3
            return
        table = self._tables[event.tier]
        added, refused = table.add(filling.bit, unpack_hashes(event.packed))
        if refused:
            filling.truncated = True
            self.refused_count += refused
        if added:
            holding.changed(event.packed, added)

    def _count_checked(
        self, feed: WorkerCacheState, holding: TierDigest, event: KvEvent
    ) -> ApplyResult:
        """The cheap half of the digest; heartbeats check the other."""
        if holding.count != event.block_count and not feed.current.truncated:
            return self._differs(feed)
        return ApplyResult.APPLIED

    def _differs(self, feed: WorkerCacheState) -> ApplyResult:
        feed.broken = True
        self._live &= ~feed.current.bit
        return self._needs_resync()

    def _needs_resync(self) -> ApplyResult:
        self.resync_count += 1
        return ApplyResult.NEEDS_RESYNC

    def _replace(self, feed: WorkerCacheState, filling: SnapshotBuffer) -> None:
        self._retire(feed.current)
        feed.current, feed.next, feed.broken = filling, None, False
        filling.expected.clear()
        self._live |= filling.bit

    def _retire(self, filling: SnapshotBuffer) -> None:
        self.generation += 1
        self.change_count += 1
        self._live &= ~filling.bit
        self._slots.retire(filling.slot)

    def _take_slot(self, ref: WorkerRef) -> int:
        """Sweeps in one go when slots have run out before anybody swept."""
        while self._slots.exhausted and self._slots.retired:
            self.sweep(SWEEP_BLOCKS)
        return self._slots.take(ref)
