"""Memory of this process that a process of the pool reads and writes too."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import ConfigError


class SharedArena:
    """`nbytes` of zeroes without a name, which begin at a page. `descriptor` is for the process of the pool."""

    def __init__(self, nbytes: int) -> None:
        """Raises ConfigError when the host cannot give as much memory."""
        try:
            self.descriptor = os.memfd_create("headrace-kv-blocks", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, nbytes)
            self._memory = mmap.mmap(self.descriptor, nbytes)
        except OSError as error:
            raise ConfigError(
                f"no shared memory of {nbytes / 2**30:.1f} GiB for KV blocks: {error.strerror}; lower kv_host_gib",
                metadata={"field": "kv_host_gib"},
            ) from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)

    def close(self) -> None:
        """Closes the descriptor. The memory stays while arrays refer to it."""
        os.close(self.descriptor)
        # Another file may get the number.
        self.descriptor = -1
