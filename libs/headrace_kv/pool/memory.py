"""Slots for blocks: what a rank shares with the process of its pool, and how that process reaches them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headrace_common.errors import TransferFailed
from headrace_kv.plan.block_copy import StridedCopy
from headrace_kv.pool.seal import SEAL_BYTES

OWN_SHARD: Final = 0
"""The shard of a block that a rank stores, and reads straight into its slots."""
STEP_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class ShardSource:
    """Blocks of another shard: their size in the store, and what a rank copies out of one into a slot."""

    object_bytes: int
    copies: tuple[StridedCopy, ...]


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """One rank's slots for blocks, in shared memory. Slot i starts at i * `slot_bytes`.

    The first `object_bytes` of a slot are stored. The last SEAL_BYTES of these belong to the pool. `others`: further
    shards that the rank reads. Shard i is the i-th of them, from 1 on.
    """

    descriptor: int
    slot_bytes: int
    slot_count: int
    object_bytes: int
    others: tuple[ShardSource, ...] = ()


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


class Mapping:
    """Maps shared memory by its descriptor. The memory is valid while this object exists."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = mmap.mmap(memory.descriptor, memory.slot_bytes * memory.slot_count)
        self._first = ctypes.c_uint8.from_buffer(self._memory)
        self.slots = Slots(
            ctypes.addressof(self._first),
            memory.slot_bytes,
            memory.slot_count,
            memory.object_bytes,
            memory.others,
        )


class ShardMemory:
    """STEP_BYTES, or one block of the largest of `sources` where that is more."""

    def __init__(self, sources: Iterable[ShardSource]) -> None:
        self._nbytes = max(STEP_BYTES, *(source.object_bytes for source in sources))
        self._memory = mmap.mmap(-1, self._nbytes)
        self._address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory))

    def whole(self) -> Slots:
        """All of it as one slot."""
        return Slots(self._address, self._nbytes, 1, self._nbytes)

    def slots_of(self, source: ShardSource) -> Slots:
        """As many slots for blocks of a shard as there is room for."""
        size = source.object_bytes
        return Slots(self._address, size, self._nbytes // size, size)


def copy_heads(
    source_address: int, destination_address: int, copies: Iterable[StridedCopy]
) -> None:
    """Makes the copies between two blocks in this process."""
    for one in copies:
        source, destination = source_address + one.source, destination_address + one.destination
        for piece in range(one.count):
            ctypes.memmove(
                destination + piece * one.destination_stride,
                source + piece * one.source_stride,
                one.nbytes,
            )
