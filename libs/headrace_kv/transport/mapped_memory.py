"""KV memory of a process that another process of the same user and host maps.

The owner puts the pages of a memfd in the place of those that its allocator gave it. The other process opens the
descriptor under /proc, for which it needs no right to trace processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

import numpy as np

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.copy_plan import Int64Array
from headrace_kv.layout import RankMemory
from headrace_kv.transport.memory import Bytes, bytes_at, gather, packed_word_sum, scatter

SHARED_BYTES_MIN: Final = 32 * 1024 * 1024
"""Allocators give every allocation of this size pages of its own (mallopt(3): DEFAULT_MMAP_THRESHOLD_MAX)."""

_NAME: Final = "headrace-kv"
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def share_pages(base_address: int, nbytes: int) -> int:
    """Moves [base_address, base_address + nbytes) to a new memfd, in place, and returns its descriptor.

    The memfd starts with the first page of the range. Whole pages of the range become zeroes. No thread may use the
    range meanwhile. Raises ConfigError for fewer than SHARED_BYTES_MIN bytes, or when the kernel refuses.
    """
    if nbytes < SHARED_BYTES_MIN:
        raise ConfigError(
            f"KV memory of {nbytes / 2**20:.1f} MiB cannot be shared between processes: use at least "
            f"{SHARED_BYTES_MIN >> 20} MiB for each rank"
        )
    start = _first_page(base_address)
    size = _first_page(base_address + nbytes - 1) + mmap.PAGESIZE - start
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        # The allocator has its own data in these pages.
        for offset in (0, size - mmap.PAGESIZE):
            os.pwrite(descriptor, bytes_at(start + offset, mmap.PAGESIZE).data, offset)
        _map_over(start, size, descriptor)
    except OSError as error:
        raise ConfigError(f"KV memory cannot be shared: {error.strerror}") from error
    return descriptor


def _map_over(address: int, nbytes: int, descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    mapped = library.mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED,
        descriptor,
        ctypes.c_long(0),
    )
    if mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _first_page(address: int) -> int:
    return address - address % mmap.PAGESIZE


class MappedMemory:
    """A Memory: the KV memory of a rank in process `process_id`, which has shared it with `descriptor`.

    Its addresses are those of that process. The mapping outlives the process. Raises TransferFailed when the
    descriptor cannot be opened.
    """

    on_host = False
    staged = True

    def __init__(self, process_id: int, descriptor: int, memory: RankMemory) -> None:
        try:
            opened = os.open(f"/proc/{process_id}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._pages = np.frombuffer(mmap.mmap(opened, 0), np.uint8)
            finally:
                os.close(opened)
        except OSError as error:
            raise TransferFailed(
                f"the memory of process {process_id} cannot be mapped: {error.strerror}"
            ) from error
        self._shift = int(self._pages.ctypes.data) - _first_page(memory.base_address)
        self.admit(memory.base_address, memory.arena_bytes)

    def admit(self, base_address: int, nbytes: int) -> None:
        """Raises TransferFailed unless the range is mapped."""
        first = base_address + self._shift - int(self._pages.ctypes.data)
        if first < 0 or nbytes <= 0 or first + nbytes > len(self._pages):
            raise TransferFailed("the memory of a rank is not the memory that it has shared")

    def allocate(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        gather(self._here(addresses), lengths, target)

    def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
        scatter(source, self._here(addresses), lengths)

    def word_sum(self, addresses: Int64Array, lengths: Int64Array, seed: int) -> int:
        return packed_word_sum(self, addresses, lengths, seed)

    def _here(self, addresses: Int64Array) -> Int64Array:
        return addresses + self._shift
