"""The state of each worker in the prefix index, without the blocks themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace_common.errors import InternalError
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import HASH_BYTES, KvEvent, xor_of_packed

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
