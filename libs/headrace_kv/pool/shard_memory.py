"""Memory for blocks of other shards, of which a rank copies its heads into its slots."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from headrace_kv.plan.saved_shards import StridedCopy
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
        pieces = _pieces(source_address + one.source, one.count, one.nbytes, one.source_stride)
        _pieces(
            destination_address + one.destination, one.count, one.nbytes, one.destination_stride
        )[...] = pieces


def _pieces(address: int, count: int, nbytes: int, stride: int) -> NDArray[np.uint8]:
    """A view of pieces of memory, of shape [count, nbytes]."""
    span = (count - 1) * stride + nbytes
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(address))
    return as_strided(flat, (count, nbytes), (stride, 1))
