"""Staged writes, and the slots of host memory that their runs are gathered into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from headrace_common.errors import HeadraceError, TransferFailed
from headrace_kv.copy_plan import Int64Array, Runs
from headrace_kv.transport.base import Strategy, WriteResult
from headrace_kv.transport.memory import Bytes, Memory


class BufferSlots:
    """Slots 0 to `count` - 1. Any thread may call its methods."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._free = list(range(count))
        self._fault = ""

    def acquire(self, deadline_s: float) -> int:
        """Waits for a free slot. Raises TransferFailed at the deadline, by time.monotonic, or once closed."""
        with self._changed:
            while not self._free and not self._fault:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0.0:
                    raise TransferFailed("no staging or landing slot became free in time")
                self._changed.wait(remaining_s)
            if self._fault:
                raise TransferFailed(self._fault)
            # The slot that was used last is likeliest to be in a CPU cache.
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Makes a slot free."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def close(self, fault: str) -> None:
        """Fails every present and later `acquire`."""
        with self._changed:
            self._fault = fault
            self._changed.notify_all()


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
        self._slots = BufferSlots(slot_count)
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


class StagedWrite:
    """Counts parts; the future ends with the last of them. Any thread may call its methods.

    It starts with one part, which belongs to its maker.
    """

    def __init__(self, strategy: Strategy, transport: str) -> None:
        self.future: Future[WriteResult] = Future()
        self._lock = threading.Lock()
        self._strategy = strategy
        self._transport = transport
        self._entry_count = 0
        self._gather_ns = self._wait_ns = 0
        self._parts = 1
        self._error: HeadraceError | None = None

    @property
    def failed(self) -> bool:
        """Whether a part has failed, so that no other need start."""
        return self._error is not None

    def start_part(self) -> None:
        with self._lock:
            self._parts += 1

    def add_result(self, result: WriteResult) -> None:
        """Adds the entries of a write of the inner transport."""
        with self._lock:
            self._transport = result.transport
            self._entry_count += result.entry_count

    def add_times(self, *, gather_ns: int = 0, wait_ns: int = 0) -> None:
        """Adds the time of copies to staging memory, and of waits for slots."""
        with self._lock:
            self._gather_ns += gather_ns
            self._wait_ns += wait_ns

    def end_part(self, error: HeadraceError | None) -> None:
        """Ends one part. The first error fails the write."""
        with self._lock:
            self._error = self._error or error
            self._parts -= 1
            if self._parts:
                return
            error = self._error
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(
                WriteResult(
                    self._transport,
                    self._strategy,
                    self._entry_count,
                    self._gather_ns,
                    self._wait_ns,
                )
            )
