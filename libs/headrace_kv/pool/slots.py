"""Memory that is cut in slots for blocks. See PoolMemory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from headrace_common.errors import TransferFailed
from headrace_kv.pool.base import ShardSource
from headrace_kv.pool.seal import SEAL_BYTES


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory at `address`, cut in slots. See PoolMemory."""

    address: int
    slot_bytes: int
    slot_count: int
    object_bytes: int
    others: tuple[ShardSource, ...] = ()

    def object_at(self, slot: int) -> int:
        """The address of a slot. Raises TransferFailed for a number that no slot has."""
        if not 0 <= slot < self.slot_count:
            raise TransferFailed(f"there is no slot {slot} among {self.slot_count}")
        return self.address + slot * self.slot_bytes

    def content_of(self, slot: int) -> memoryview:
        """The bytes of a slot before the seal."""
        return self._view(slot)[:-SEAL_BYTES]

    def seal_of(self, slot: int) -> memoryview:
        """The seal of a slot."""
        return self._view(slot)[-SEAL_BYTES:]

    def _view(self, slot: int) -> memoryview:
        array = (ctypes.c_uint8 * self.object_bytes).from_address(self.object_at(slot))
        return memoryview(array).cast("B")
