"""What the router knows of one worker's announced blocks, less the blocks themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.events import HASH_BYTES, KvEvent, xor_of_packed

# Changes are digested together, since one call for thousands of hashes costs little more than for one.
_PENDING_BYTES_MAX: Final = 65_536 * HASH_BYTES


@dataclass(slots=True)
class TierDigest:
    """One tier of one worker: how many blocks carry its bit, and their digest."""

    count: int = 0
    digested: int = 0
    pending: list[bytes] = field(default_factory=list)
    pending_bytes: int = 0

    def changed(self, packed: bytes, by_count: int) -> None:
        """Every hash of `packed` has come (or, with a negative count, gone)."""
        self.count += by_count
        self.pending.append(packed)
        self.pending_bytes += len(packed)
        if self.pending_bytes > _PENDING_BYTES_MAX:
            self.xor()

    def xor(self) -> int:
        """The exclusive or of all hashes that carry the bit."""
        if self.pending:
            self.digested ^= xor_of_packed(b"".join(self.pending))
            self.pending.clear()
            self.pending_bytes = 0
        return self.digested

    def matches(self, event: KvEvent) -> bool:
        """Whether the worker announces the same set, as of this event."""
        return self.count == event.block_count and self.xor() == event.hash_xor


@dataclass(slots=True)
class SnapshotBuffer:
    """A set under one slot, whole as of `sequence`."""

    slot: int
    sequence: int
    holdings: dict[int, TierDigest] = field(default_factory=dict)
    expected: dict[int, KvEvent] = field(default_factory=dict)
    truncated: bool = False
    bit: int = field(init=False)

    def __post_init__(self) -> None:
        # One object for all blocks that nobody else holds.
        self.bit = 1 << self.slot

    def holding(self, tier: int) -> TierDigest:
        found = self.holdings.get(tier)
        if found is None:
            found = self.holdings[tier] = TierDigest()
        return found

    def complete(self) -> bool:
        """Whether every part of the snapshot has arrived. One cut short for want of room counts."""
        return self.truncated or all(
            self.holding(tier).matches(event) for tier, event in self.expected.items()
        )


@dataclass(slots=True)
class WorkerCacheState:
    """One worker: the set that lookups use, and the snapshot that will replace it.

    A `broken` feed differs from what its worker announces and waits for a snapshot.
    """

    ref: WorkerRef
    current: SnapshotBuffer
    next: SnapshotBuffer | None = None
    broken: bool = True
