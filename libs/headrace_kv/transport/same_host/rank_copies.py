"""Copies between the memories of processes of this host. The bytes pass through this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from headrace_kv.layout.layout import RankMemory
from headrace_kv.plan.runs import Runs
from headrace_kv.transport.packing import Bytes
from headrace_kv.transport.same_host.process_memory import (
    ENTRIES_PER_CALL,
    ProcessMemory,
    start_time_ticks,
)


class RankCopies:
    """A LocalWrite for ranks that are processes. Call it from one thread at a time, and `close` once after that.

    `process_ids` are by rank. The processes must be descendants of this one where Yama's ptrace_scope is 1.
    Raises TransferFailed for one of `memories` that cannot be reached: its process has ended, or the kernel refuses.
    """

    def __init__(self, process_ids: Mapping[int, int], memories: Iterable[RankMemory]) -> None:
        self._processes: dict[int, ProcessMemory] = {}
        self._buffer: Bytes = np.empty(0, np.uint8)
        try:
            for memory in memories:
                pid = process_ids[memory.rank]
                process = ProcessMemory(pid, start_time_ticks(pid))
                self._processes[memory.rank] = process
                for address in (memory.base_address, memory.base_address + memory.arena_bytes - 1):
                    # The kernel asks for the same permission as for a write.
                    process.read(address, 1)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the processes."""
        while self._processes:
            self._processes.popitem()[1].close()

    def __call__(
        self, source: RankMemory, destination: RankMemory, runs: Runs, timeout_s: float
    ) -> None:
        """Nothing lands after it has returned or raised. `timeout_s` is unused: these calls do not wait."""
        nbytes = runs.payload_bytes
        if len(self._buffer) < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        self._processes[source.rank].gather(runs.source_addresses, runs.lengths, self._buffer)
        offsets = np.cumsum(runs.lengths) - runs.lengths
        addresses = self._buffer.ctypes.data + offsets
        packed = Runs(addresses, runs.destination_addresses, runs.lengths)
        for batch in packed.batches(ENTRIES_PER_CALL, nbytes):
            self._processes[destination.rank].write(batch)
