"""Memory for blocks of other shards, of which a rank copies its heads into its slots."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Final

from headrace_kv.plan.block_copy import StridedCopy
from headrace_kv.pool.base import ShardSource
from headrace_kv.pool.slots import Slots

STEP_BYTES: Final = 32 << 20


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
