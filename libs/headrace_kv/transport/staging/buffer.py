"""Slots of host memory that runs are gathered into before a write."""

from __future__ import annotations

from collections.abc import Callable

from headrace_kv.plan.copy_plan import Int64Array, Runs
from headrace_kv.transport.memory import Memory
from headrace_kv.transport.packing import Bytes
from headrace_kv.transport.staging.slots import Slots


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

    def gather(self, runs: Runs, deadline_s: float) -> tuple[int, int]:
        """Gathers runs into a free slot; returns the slot and its address.

        Raises TransferFailed when no slot is free by the deadline, or as Memory.gather does.
        """
        slot = self._slots.acquire(deadline_s)
        try:
            if self._bytes is None:
                self._bytes = self._memory.allocate(self._slot_count * self._slot_bytes)
                self._register(int(self._bytes.ctypes.data), self._bytes.nbytes)
            part = self._bytes[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]
            self._memory.gather(runs.source_addresses, runs.lengths, part)
        except BaseException:
            self._slots.release(slot)
            raise
        return slot, int(part.ctypes.data)

    def release(self, slot: int) -> None:
        """Makes a slot free, once nothing reads it."""
        self._slots.release(slot)


def packed_addresses(first: int, lengths: Int64Array) -> Int64Array:
    """Addresses of runs that lie one after the other."""
    return first + lengths.cumsum() - lengths
