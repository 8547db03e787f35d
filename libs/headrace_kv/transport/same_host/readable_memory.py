"""The memory of another process of this host, which this process only reads."""

from __future__ import annotations

import numpy as np

from headrace_common.errors import InternalError
from headrace_kv.plan.copy_plan import Int64Array
from headrace_kv.transport.packing import Bytes
from headrace_kv.transport.same_host.process_memory import ProcessMemory, start_time_ticks


class ReadableMemory:
    """A Memory. The process must be a descendant of this one where Yama's ptrace_scope is 1.

    Raises TransferFailed for a process that cannot be read: it has ended, or the kernel refuses.
    """

    on_host = False
    staged = True

    def __init__(self, pid: int) -> None:
        self._process = ProcessMemory(pid, start_time_ticks(pid))

    def close(self) -> None:
        """Call it once."""
        self._process.close()

    def admit(self, base_address: int, nbytes: int) -> None:
        """Raises TransferFailed unless both ends of the range can be read."""
        for address in (base_address, base_address + nbytes - 1):
            self._process.read(address, 1)

    def allocate(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        self._process.gather(addresses, lengths, target)

    def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
        raise InternalError("this process only reads the memory of another process")
