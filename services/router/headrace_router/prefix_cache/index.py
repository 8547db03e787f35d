"""The index of prefix blocks and the workers that hold them. Pure. One event loop owns it.

Each worker announces prefix-closed sets in numbered events. A gap in the numbers or a different digest shows that
events were lost, duplicated or reordered. A replay or a snapshot repairs that. Until then the worker keeps the credit
for its last known set, unless `suspend` or a wrong digest removes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import InternalError
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import HASH_BYTES, KvEvent, Tier, unpack_hashes, xor_of_packed
from headrace_kv.prefix.hashing import PromptHashes
from headrace_router.prefix_cache.block_table import PrefixTable, by_slot

# Changes are digested together: one call for thousands of hashes costs little more than for one.
_PENDING_BYTES_MAX: Final = 65_536 * HASH_BYTES


class SlotPool:
    """Assigns slots, the bits of masks, from 0 up, the lowest free one first.

    A retired slot is free once its bit is on no block.
    """

    def __init__(self, slots_max: int) -> None:
        self.slots_max = slots_max
        self.retired = 0
        self._used = 0

    @property
    def width(self) -> int:
        """The slots up to the last one in use."""
        return self._used.bit_length()

    @property
    def exhausted(self) -> bool:
        """Whether no slot is free."""
        return self._used.bit_count() >= self.slots_max

    def assign(self) -> int:
        """Assigns a slot. Raises InternalError when none is free."""
        if self.exhausted:
            raise InternalError(f"all {self.slots_max} slots of the prefix index are taken")
        slot = (~self._used & self._used + 1).bit_length() - 1
        self._used |= 1 << slot
        return slot

    def retire(self, slot: int) -> None:
        """Blocks may still carry the bit of the slot."""
        self.retired |= 1 << slot

    def reclaim(self, mask: int) -> None:
        """Frees retired slots with bits that no block carries."""
        self.retired &= ~mask
        self._used &= ~mask


@dataclass(slots=True)
class TierDigest:
    """One tier of one worker: the number of blocks with its bit, and their digest."""

    count: int = 0
    _xor: int = 0
    _pending: list[bytes] = field(default_factory=list)
    _pending_bytes: int = 0

    def update(self, packed: bytes, count_change: int) -> None:
        """All hashes of `packed` were added, or with a negative change removed."""
        self.count += count_change
        self._pending.append(packed)
        self._pending_bytes += len(packed)
        if self._pending_bytes > _PENDING_BYTES_MAX:
            self._digest_pending()

    def matches(self, event: KvEvent) -> bool:
        """Whether the worker announces the same set, as of this event."""
        if self.count != event.block_count:
            return False
        self._digest_pending()
        return self._xor == event.hash_xor

    def _digest_pending(self) -> None:
        if self._pending:
            self._xor ^= xor_of_packed(b"".join(self._pending))
            self._pending.clear()
            self._pending_bytes = 0


@dataclass(slots=True)
class SnapshotBuffer:
    """A set of blocks under one slot, as of `sequence`. Built from a snapshot, then updated by events.

    A `truncated` set lacks blocks that did not fit into the index.
    """

    slot: int
    sequence: int
    truncated: bool = False
    bit: int = field(init=False)
    _digests: dict[int, TierDigest] = field(default_factory=dict)
    _expected: dict[int, KvEvent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # All blocks with this worker as the only holder share one object.
        self.bit = 1 << self.slot

    def digest(self, tier: int) -> TierDigest:
        """The digest of a tier."""
        found = self._digests.get(tier)
        if found is None:
            found = self._digests[tier] = TierDigest()
        return found

    def applied(self, sequence: int) -> None:
        """The event with this sequence number was applied."""
        self.sequence = sequence

    def truncate(self) -> None:
        """Some blocks did not fit into the index."""
        self.truncated = True

    def expect(self, event: KvEvent) -> None:
        """The complete set must match the digest of this part of the snapshot."""
        self._expected[event.tier] = event

    def complete(self) -> bool:
        """Whether every part of the snapshot has arrived. A truncated set counts as complete."""
        return self.truncated or all(
            self.digest(tier).matches(event) for tier, event in self._expected.items()
        )

    def completed(self) -> None:
        """The snapshot is complete. From now on events update the set."""
        self._expected.clear()


@dataclass(slots=True)
class WorkerCacheState:
    """One worker: the set that lookups use, and the snapshot that will replace it.

    A `broken` worker's set differs from what the worker announces. It needs a snapshot.
    """

    ref: WorkerRef
    current: SnapshotBuffer
    next: SnapshotBuffer | None = None
    broken: bool = True

    def mark_broken(self) -> None:
        """The current set differs from what the worker announces."""
        self.broken = True

    def start_snapshot(self, snapshot: SnapshotBuffer) -> None:
        """A snapshot has begun to arrive. It replaces one that is incomplete."""
        self.next = snapshot

    def replace_current(self, snapshot: SnapshotBuffer) -> None:
        """A snapshot is complete: it replaces the current set."""
        snapshot.completed()
        self.current, self.next, self.broken = snapshot, None, False


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
        added, refused = self._tables[event.tier].add(blocks.bit, unpack_hashes(event.packed))
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
