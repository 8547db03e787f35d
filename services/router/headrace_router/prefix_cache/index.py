"""The index of prefix blocks and the workers that hold them. Pure. One event loop owns it.

Each worker announces prefix-closed sets in numbered events. A gap in the numbers or a different digest shows that
events were lost, duplicated or reordered. A replay or a snapshot repairs that. Until then the worker keeps the credit
for its last known set, unless `suspend` or a wrong digest removes it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import InternalError
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import KvEvent, Tier, unpack_hashes
from headrace_kv.prefix.hashing import PromptHashes
from headrace_router.prefix_cache.block_table import PrefixTable, by_slot
from headrace_router.prefix_cache.worker_state import (
    SlotPool,
    SnapshotBuffer,
    TierDigest,
    WorkerCacheState,
)

BLOCKS_MAX: Final = 16_000_000
SLOTS_MAX: Final = 4_096
SWEEP_BLOCKS: Final = 4_096


class ApplyResult(Enum):
    """What became of an event."""

    APPLIED = "applied"
    IGNORED = "ignored"
    """It is a duplicate, or from another incarnation."""
    NEEDS_RESYNC = "needs_resync"
    """The subscriber must subscribe again, from `resume_after`."""


class PrefixIndex:
    """The union of all workers' announced sets.

    Each tier stores at most `blocks_max` blocks. When the blocks of a worker do not fit, it gets credit for those that
    did, until there is room again. A worker's slot changes whenever a snapshot replaces its set, so slots are valid
    until the next change of `generation`. All lookups give the same result while `change_count` is the same.
    """

    def __init__(self, blocks_max: int = BLOCKS_MAX, slots_max: int = SLOTS_MAX) -> None:
        self.generation = 0
        self.change_count = 0
        # A list, because members of an enumeration are slow dictionary keys.
        self._tables = [PrefixTable(blocks_max) for _ in range(max(Tier) + 1)]
        self._blocks_max = blocks_max
        self._slots = SlotPool(slots_max)
        self._states: dict[WorkerRef, WorkerCacheState] = {}
        # Bits that lookups may report.
        self._live = 0
        # Retired bits that the current pass clears.
        self._sweeping = 0
        self._handlers: dict[str, Callable[[WorkerCacheState, KvEvent], ApplyResult]] = {
            "stored": self._store,
            "removed": self._remove,
            "snapshot": self._add_snapshot,
            "cleared": self._clear,
            "heartbeat": self._check,
        }

    @property
    def block_count(self) -> int:
        """The number of distinct blocks, summed over tiers."""
        return sum(map(len, self._tables))

    def add_worker(self, ref: WorkerRef) -> int:
        """Adds a worker and returns its slot. It gets no credit before its first snapshot is complete."""
        if ref in self._states:
            raise InternalError(f"{ref} is in the prefix index already")
        state = WorkerCacheState(ref, SnapshotBuffer(self._assign_slot(), 0))
        self._states[ref] = state
        self.generation += 1
        # Its slot may be beyond the last one.
        self.change_count += 1
        return state.current.slot

    def remove_worker(self, ref: WorkerRef) -> None:
        """Ends the worker's credit at once. Later sweeps remove its blocks."""
        state = self._states.pop(ref, None)
        if state is not None:
            self._retire(state.current)
            if state.next is not None:
                self._retire(state.next)

    def suspend(self, ref: WorkerRef) -> None:
        """Removes the worker's credit until its next heartbeat matches: its events have stopped."""
        state = self._states.get(ref)
        if state is not None:
            self.change_count += 1
            self._live &= ~state.current.bit

    def resume_after(self, ref: WorkerRef) -> int:
        """`since_sequence` for the next subscription. 0 asks for a snapshot."""
        state = self._states[ref]
        return 0 if state.broken else state.current.sequence

    def slot(self, ref: WorkerRef) -> int | None:
        """The slot of a worker in this index."""
        state = self._states.get(ref)
        return None if state is None else state.current.slot

    def find(
        self, hashes: list[int] | PromptHashes, tier: Tier = Tier.DEVICE
    ) -> NDArray[np.float64]:
        """How many of these blocks, from the first on, the worker of each slot holds. Shape [slot].

        Of a prompt, it hashes about twice as many blocks as the deepest holder has, at most.
        """
        return by_slot(self._tables[tier].find(hashes, self._live), self._slots.width)

    def apply(self, ref: WorkerRef, event: KvEvent) -> ApplyResult:
        """Applies one event of the worker's stream. Events may arrive in any order."""
        state = self._states.get(ref)
        if state is None or event.incarnation != ref.incarnation:
            return ApplyResult.IGNORED
        self.change_count += 1
        return self._handlers[event.kind](state, event)

    def sweep(self, budget: int = SWEEP_BLOCKS) -> bool:
        """Clears retired bits from up to `budget` blocks. Returns whether there is more to do.

        A pass starts with a list of all blocks, which takes a few milliseconds per million.
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

    def _store(self, state: WorkerCacheState, event: KvEvent) -> ApplyResult:
        current = state.current
        rejection = self._check_order(state, event)
        if rejection is not None:
            return rejection
        current.applied(event.sequence)
        if current.truncated:
            return ApplyResult.APPLIED
        digest = current.digest(event.tier)
        self._add(current, digest, event)
        return self._check_count(state, digest, event)

    def _remove(self, state: WorkerCacheState, event: KvEvent) -> ApplyResult:
        current = state.current
        rejection = self._check_order(state, event)
        if rejection is not None:
            return rejection
        current.applied(event.sequence)
        digest = current.digest(event.tier)
        removed = self._tables[event.tier].remove(current.bit, unpack_hashes(event.packed))
        digest.update(event.packed, -removed)
        return self._check_count(state, digest, event)

    def _clear(self, state: WorkerCacheState, event: KvEvent) -> ApplyResult:
        if event.sequence <= state.current.sequence:
            return ApplyResult.IGNORED
        # The empty set is correct whichever events were lost before.
        self._replace(state, self._start_snapshot(state, event.sequence))
        return ApplyResult.APPLIED

    def _add_snapshot(self, state: WorkerCacheState, event: KvEvent) -> ApplyResult:
        if event.sequence < state.current.sequence:
            return ApplyResult.IGNORED
        snapshot = state.next
        if snapshot is None or snapshot.sequence != event.sequence:
            snapshot = self._start_snapshot(state, event.sequence)
        snapshot.expect(event)
        self._add(snapshot, snapshot.digest(event.tier), event)
        if not event.last:
            return ApplyResult.APPLIED
        if not snapshot.complete():
            return ApplyResult.NEEDS_RESYNC
        self._replace(state, snapshot)
        return ApplyResult.APPLIED

    def _check(self, state: WorkerCacheState, event: KvEvent) -> ApplyResult:
        current = state.current
        if event.sequence < current.sequence:
            return ApplyResult.IGNORED
        if state.broken or event.sequence > current.sequence:
            return ApplyResult.NEEDS_RESYNC
        if current.truncated:
            if max(map(len, self._tables)) * 10 < self._blocks_max * 9:
                state.mark_broken()
                return ApplyResult.NEEDS_RESYNC
            self._live |= current.bit
            return ApplyResult.APPLIED
        if not current.digest(event.tier).matches(event):
            return self._mark_broken(state)
        self._live |= current.bit
        return ApplyResult.APPLIED

    def _check_order(self, state: WorkerCacheState, event: KvEvent) -> ApplyResult | None:
        """None when the event is the next one."""
        if event.sequence <= state.current.sequence:
            return ApplyResult.IGNORED
        if state.broken or event.sequence != state.current.sequence + 1:
            return ApplyResult.NEEDS_RESYNC
        return None

    def _check_count(
        self, state: WorkerCacheState, digest: TierDigest, event: KvEvent
    ) -> ApplyResult:
        """Checks the count, the cheap half of the digest. Heartbeats check the other half."""
        if digest.count != event.block_count and not state.current.truncated:
            return self._mark_broken(state)
        return ApplyResult.APPLIED

    def _add(self, blocks: SnapshotBuffer, digest: TierDigest, event: KvEvent) -> None:
        """Adds nothing more to a truncated set, so that it stays prefix-closed."""
        if blocks.truncated:
            return
        table = self._tables[event.tier]
        added, refused = table.add(blocks.bit, unpack_hashes(event.packed))
        if refused:
            blocks.truncate()
        if added:
            digest.update(event.packed, added)

    def _mark_broken(self, state: WorkerCacheState) -> ApplyResult:
        state.mark_broken()
        self._live &= ~state.current.bit
        return ApplyResult.NEEDS_RESYNC

    def _start_snapshot(self, state: WorkerCacheState, sequence: int) -> SnapshotBuffer:
        if state.next is not None:
            self._retire(state.next)
        snapshot = SnapshotBuffer(self._assign_slot(), sequence)
        state.start_snapshot(snapshot)
        return snapshot

    def _replace(self, state: WorkerCacheState, snapshot: SnapshotBuffer) -> None:
        self._retire(state.current)
        state.replace_current(snapshot)
        self._live |= snapshot.bit

    def _retire(self, blocks: SnapshotBuffer) -> None:
        self.generation += 1
        self.change_count += 1
        self._live &= ~blocks.bit
        self._slots.retire(blocks.slot)

    def _assign_slot(self) -> int:
        """Sweeps completely first when no slot is free."""
        while self._slots.exhausted and self._slots.retired:
            self.sweep(SWEEP_BLOCKS)
        return self._slots.assign()
