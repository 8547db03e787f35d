"""Slots of host memory that runs are gathered into before a write."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from headrace_kv.plan.copy_plan import Int64Array, Runs
from headrace_kv.transport.memory import Memory
from headrace_kv.transport.packing import Bytes
from headrace_kv.transport.staging.slots import Slots


class Gathered(NamedTuple):
    """Runs in a staging slot: its number and address, and the times of the wait for it and of the copies."""

    slot: int
    address: int
    wait_ns: int
    copy_ns: int


class StagingBuffer:
    """Allocated on first use. `register(address, nbytes)` is called once, before its first write."""

    def __init__(
        self,
        memory: Memory,
        slot_count: int,
        slot_bytes: int,
        register: Callable[[int, int], None],
    ) -> None:
        self._memory = memory
        self._slot_count = slot_count
        self._slot_bytes = slot_bytes
        self._register = register
        self._slots = Slots(slot_count)
        self._bytes: Bytes | None = None

    def gather(self, runs: Runs, deadline_s: float) -> Gathered:
        """Gathers runs into a free slot.

        Raises TransferFailed when no slot is free by the deadline, or as Memory.gather does.
        """
        start_ns = time.monotonic_ns()
        slot = self._slots.acquire(deadline_s)
        acquired_ns = time.monotonic_ns()
        try:
            if self._bytes is None:
                self._bytes = self._memory.allocate(self._slot_count * self._slot_bytes)
                self._register(int(self._bytes.ctypes.data), self._bytes.nbytes)
            part = self._bytes[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]
            self._memory.gather(runs.source_addresses, runs.lengths, part)
        except BaseException:
            self._slots.release(slot)
            raise
        copied_ns = time.monotonic_ns()
        address = int(part.ctypes.data)
        return Gathered(slot, address, acquired_ns - start_ns, copied_ns - acquired_ns)

    def release(self, slot: int) -> None:
        """Makes a slot free, once nothing reads it."""
        self._slots.release(slot)


def packed_addresses(first: int, lengths: Int64Array) -> Int64Array:
    """Addresses of runs that lie one after the other."""
    return first + lengths.cumsum() - lengths
