"""Memory of this process that a process of the pool reads and writes too."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import ConfigError
from headrace_kv.layout.arena import require_available

_NAME: Final = "headrace-kv-blocks"
_POPULATE_WRITE: Final = 23
"""An advice of Linux 5.14 and later."""
log = logging.getLogger(__name__)


class SharedArena:
    """`nbytes` of zeroes without a name, which begin at a page. `descriptor` is for other mappings of it."""

    def __init__(self, nbytes: int, setting: str = "kv_host_gib") -> None:
        """Raises ConfigError when the host cannot give as much memory. `setting` is the field that asks for it."""
        require_available(nbytes, setting)
        try:
            self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, nbytes)
            self._memory = mmap.mmap(self.descriptor, nbytes)
        except OSError as error:
            raise ConfigError(
                f"no shared memory of {nbytes / 2**30:.1f} GiB for KV blocks: {error.strerror}; lower {setting}",
                metadata={"field": setting},
            ) from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)

    def populate_library_mappings(self) -> None:
        """Gives mappings that a library made in this process their pages, so that its writes do not wait for memory.

        Takes about half a second for each GiB. Other threads run meanwhile.
        """
        library = ctypes.CDLL(None, use_errno=True)
        for address, nbytes in self._library_mappings():
            failed = library.madvise(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE
            )
            if failed:
                reason = os.strerror(ctypes.get_errno())
                log.info("memory for KV blocks gets its pages when it is used: %s", reason)

    def _library_mappings(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of each, from proc_pid_maps(5)."""
        ours = int(self.bytes.ctypes.data)
        inode = os.fstat(self.descriptor).st_ino
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, _, _, _, number, *name = line.split(maxsplit=5)
            if int(number) == inode and name and name[0].startswith(f"/memfd:{_NAME} "):
                first, end = (int(address, 16) for address in addresses.split("-"))
                if first != ours:
                    yield first, end - first

    def close(self) -> None:
        """Closes the descriptor. The memory stays while arrays refer to it."""
        os.close(self.descriptor)
        # Another file may get the number.
        self.descriptor = -1
