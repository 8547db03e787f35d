"""A transport within one process that can inject faults. For tests of everything above a transport."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from headrace_common.errors import ConfigError, HeadraceError, TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import KvTransport, WriteResult, failed_future, session_of
from headrace_kv.transport.factory import OPENERS

KIND: Final = "in_memory"
"""For open_transport."""


class FaultKind(Enum):
    """The fault of a write."""

    FAIL = "raises, nothing lands"
    FAIL_LATE = "raises at once, everything lands `seconds` later"
    TRUNCATE = "raises, the first half of the runs has landed"
    CORRUPT = "succeeds, but a bit of the first run has changed on the way"
    DROP = "reports success, nothing lands"
    DELAY = "succeeds `seconds` late"
    HOLD = "waits until `release` is set, then succeeds"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one write. `seconds` is for FAIL_LATE and DELAY, `release` for HOLD."""

    kind: FaultKind
    seconds: float = 0.0
    release: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults by the number of the write, counted from 1. `every` applies to all others."""

    by_write: Mapping[int, Fault] = field(default_factory=dict)
    every: Fault | None = None

    def fault_of(self, number: int) -> Fault | None:
        """The fault of write `number`, if any."""
        return self.by_write.get(number, self.every)


class MemoryFabric:
    """The registered memory of transports that reach each other, by session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._regions: dict[str, list[tuple[int, int]]] = {}

    def join(self) -> str:
        """Returns a new session without memory."""
        with self._lock:
            self._next += 1
            session = f"memory-{self._next}"
            self._regions[session] = []
            return session

    def leave(self, session: str) -> None:
        """Removes a session: writes to it fail from now on."""
        with self._lock:
            self._regions.pop(session, None)

    def add(self, session: str, base_address: int, nbytes: int) -> None:
        """Registers memory with a session."""
        with self._lock:
            self._regions[session].append((base_address, base_address + nbytes))

    def covers(self, session: str, runs: Runs, addresses_of: str) -> bool:
        """Whether every run lies within one registered range of the session. `addresses_of` names a field of Runs."""
        with self._lock:
            regions = list(self._regions.get(session, ()))
        starts = getattr(runs, addresses_of)
        ends = starts + runs.lengths
        inside = sum(((starts >= low) & (ends <= high)) for low, high in regions)
        return bool(regions) and bool((inside > 0).all())


shared_fabric = MemoryFabric()
"""The default fabric."""


class InMemoryTransport(KvTransport):
    """A transport between arenas of one process."""

    name = KIND

    def __init__(
        self,
        faults: FaultPlan | None = None,
        *,
        fabric: MemoryFabric = shared_fabric,
        quiet_after_failure_s: float = 0.0,
    ) -> None:
        self.quiet_after_failure_s = quiet_after_failure_s
        self._faults = faults or FaultPlan()
        self._fabric = fabric
        self._session = fabric.join()
        self._late: list[threading.Timer] = []
        self._closed = False
        self.write_count = 0

    @property
    def session(self) -> str:
        return self._session

    def register(self, base_address: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise ConfigError(f"cannot register {nbytes} bytes of KV memory")
        self._fabric.add(self._session, base_address, nbytes)

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        """Calls `write`."""
        try:
            result = self.write(session, runs, timeout_s)
        except HeadraceError as error:
            return failed_future(error)
        future: Future[WriteResult] = Future()
        future.set_result(result)
        return future

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        if self._closed:
            raise TransferFailed("the transport is closed")
        session = session_of(self.name, session) or session
        if timeout_s <= 0.0:
            raise TransferFailed("no time is left for this write")
        self.write_count += 1
        fault = self._faults.fault_of(self.write_count)
        if not self._fabric.covers(self._session, runs, "source_addresses"):
            raise TransferFailed("a source address is not registered")
        if not self._fabric.covers(session, runs, "destination_addresses"):
            raise TransferFailed(f"an address is not registered with {session}")
        if fault is None:
            self._copy(runs)
        else:
            self._write_faulty(fault, runs, timeout_s)
        return WriteResult(self.name, "direct", len(runs))

    def close(self) -> None:
        self._closed = True
        self._fabric.leave(self._session)
        for timer in self._late:
            timer.cancel()
            timer.join(timeout=5.0)
        self._late.clear()

    def _write_faulty(self, fault: Fault, runs: Runs, timeout_s: float) -> None:
        match fault.kind:
            case FaultKind.FAIL:
                raise TransferFailed("the fault plan fails this write")
            case FaultKind.FAIL_LATE:
                timer = threading.Timer(fault.seconds, self._copy, args=(runs,))
                self._late.append(timer)
                timer.start()
                raise TransferFailed("the fault plan fails this write, its bytes land later")
            case FaultKind.TRUNCATE:
                self._copy(runs.select(slice(len(runs) // 2)))
                raise TransferFailed("the fault plan truncates this write")
            case FaultKind.CORRUPT:
                self._copy(runs)
                address = int(runs.destination_addresses[0])
                ctypes.memset(address, ctypes.c_uint8.from_address(address).value ^ 1, 1)
                return
            case FaultKind.DROP:
                return
            case FaultKind.DELAY:
                time.sleep(min(fault.seconds, timeout_s))
            case FaultKind.HOLD:
                if not fault.release.wait(timeout_s):
                    raise TransferFailed("the fault plan held this write beyond its time")
        self._copy(runs)

    def _copy(self, runs: Runs) -> None:
        for source, destination, length in zip(
            runs.source_addresses.tolist(),
            runs.destination_addresses.tolist(),
            runs.lengths.tolist(),
            strict=True,
        ):
            ctypes.memmove(destination, source, length)


OPENERS[KIND] = lambda *place: InMemoryTransport()
