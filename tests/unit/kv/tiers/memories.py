"""Slots full of bytes, for pools of tests."""

from __future__ import annotations

from headrace_kv.tiers.pool_process import SEAL_BYTES, PoolMemory, SharedArena

SLOT_BYTES = 4_096
CONTENT_BYTES = 1_000
SLOTS = 8


class Memory:
    """`SLOTS` slots of one rank."""

    def __init__(self, slot_count: int = SLOTS, content_bytes: int = CONTENT_BYTES) -> None:
        self._content_bytes = content_bytes
        self._slot_bytes = -(-(content_bytes + SEAL_BYTES) // SLOT_BYTES) * SLOT_BYTES
        self.arena = SharedArena(self._slot_bytes * slot_count)
        self.described = PoolMemory(
            self.arena.descriptor, self._slot_bytes, slot_count, content_bytes + SEAL_BYTES
        )

    def fill(self, slot: int, value: int) -> None:
        self._content(slot)[:] = value

    def value(self, slot: int) -> int:
        """The byte that fills a slot. Raises AssertionError when there are several."""
        (value,) = set(self._content(slot).tolist())
        return int(value)

    def _content(self, slot: int):  # type: ignore[no-untyped-def] # numpy
        start = slot * self._slot_bytes
        return self.arena.bytes[start : start + self._content_bytes]
