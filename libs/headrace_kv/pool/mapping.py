"""A worker's slots in the memory of another process."""

from __future__ import annotations

import ctypes
import mmap

from headrace_kv.pool.base import PoolMemory
from headrace_kv.pool.slots import Slots


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
