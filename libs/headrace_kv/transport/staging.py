"""A transport that stages short runs where that is cheaper than to write them one by one.

"gather": runs are copied into staging memory in the destination's order and written in long entries. "scatter": runs
are written in long entries into slots of the peer's landing area, and the peer copies them into place (scatter.py).
"gather_scatter": both. Several slots on either side let gather, write and scatter overlap within a write and between
writes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import HeadraceError, TransferFailed
from headrace_common.tasks import Recent
from headrace_kv.runs import Int64Array, Runs
from headrace_kv.transport.base import (
    LANDING_ONLY,
    DirectFirst,
    KvTransport,
    Strategy,
    Thresholds,
    WriteResult,
    failed_future,
    join_sessions,
    session_of,
)
from headrace_kv.transport.guard import Address, Networks
from headrace_kv.transport.memory import HOST_MEMORY, Bytes, Memory, MemoryRanges, by_length
from headrace_kv.transport.scatter import (
    BufferSlots,
    ScatterClient,
    ScatterClients,
    ScatterServer,
    StagingLimits,
)

# The session part of the scatter server, where the memory can also be written to directly.
_SERVER_PART = "scatter"
_SCATTER_TIMEOUT_S = 10.0
_RUNS_PER_SLOT = 65_536
# Of staged bytes on their way. Several entries are in flight at once.
_ENTRY_BYTES = 1024 * 1024
_CACHE_SIZE = 64


class StagedWrite:
    """Counts the parts of a write. The future ends with the last of them.

    It starts with one part, which belongs to its maker. The maker's thread adds parts, entries and times. Any thread
    may end a part.
    """

    def __init__(self, session: str, strategy: Strategy, transport: str, deadline_s: float) -> None:
        self.session = session
        self.deadline_s = deadline_s
        self.future: Future[WriteResult] = Future()
        self._strategy = strategy
        self._transport = transport
        self._entry_count = self._wait_ns = self._gather_ns = 0
        self._lock = threading.Lock()
        self._parts = 1
        self._error: HeadraceError | None = None

    @property
    def failed(self) -> bool:
        """Whether a part has failed, so that no other need start."""
        return self._error is not None

    def acquire(self, slots: BufferSlots) -> int:
        """Waits for a free slot. Raises TransferFailed at the deadline."""
        start_ns = time.monotonic_ns()
        slot = slots.acquire(self.deadline_s)
        self._wait_ns += time.monotonic_ns() - start_ns
        return slot

    def add_gather_ns(self, gather_ns: int) -> None:
        self._gather_ns += gather_ns

    def start_part(self, entry_count: int) -> None:
        with self._lock:
            self._parts += 1
            self._entry_count += entry_count

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
            return
        self.future.set_result(
            WriteResult(
                self._transport, self._strategy, self._entry_count, self._gather_ns, self._wait_ns
            )
        )


class _Part:
    """Runs of a write on their way, and the slots that they occupy: of `staging`, and of the peer of `client`."""

    def __init__(
        self,
        write: StagedWrite,
        runs: Runs,
        staging: BufferSlots,
        client: ScatterClient | None = None,
    ) -> None:
        self.write = write
        self.runs = runs
        self._staging = staging
        self._client = client
        self._staging_slot: int | None = None
        self._landing_slot: int | None = None

    def acquire_staging(self) -> int:
        """Waits for a staging slot."""
        self._staging_slot = self.write.acquire(self._staging)
        return self._staging_slot

    def acquire_landing(self, client: ScatterClient) -> int:
        """Waits for a slot of the peer and returns its address."""
        self._landing_slot = self.write.acquire(client.slots)
        return client.landing.address + self._landing_slot * client.landing.slot_bytes

    def release_unused(self) -> None:
        """Frees the slots of a part that is not submitted."""
        self._release_staging()
        if self._client is not None and self._landing_slot is not None:
            self._client.slots.release(self._landing_slot)

    def end_on_writer_thread(self, written: Future[WriteResult]) -> None:
        """The entries have landed or failed. Runs where the inner transport ends its futures; must not block.

        The part ends here, or on the reader thread of the peer's stream, when the peer has copied it into place.
        """
        self._release_staging()
        error = written.exception()
        if error is not None and not isinstance(error, HeadraceError):
            error = TransferFailed(f"writing met a bug: {error}")
        write, client, slot = self.write, self._client, self._landing_slot
        if client is None or slot is None:
            write.end_part(error)
        elif error is None:
            # To copy one slot takes milliseconds: an unresponsive peer need not cost the whole timeout.
            scatter_s = min(write.deadline_s, time.monotonic() + _SCATTER_TIMEOUT_S)
            client.submit(slot, self.runs, scatter_s, write.end_part)
        else:
            # Late bytes may land in the slot: the peer must quarantine it before it lends it again.
            client.abort(f"a write to its slots failed: {error.detail}")
            write.end_part(error)

    def _release_staging(self) -> None:
        if self._staging_slot is not None:
            self._staging.release(self._staging_slot)


class StagedTransport(DirectFirst):
    """Another transport, of which runs may be staged.

    Device memory that the inner transport cannot reach (`memory.staged`) is always staged. Device memory that it
    reaches is written directly where the peer's memory allows, because a gather would cost the device's time.

    The sender's thread plans a write, waits for slots, gathers, and submits each part.
    """

    entry_limit = 16_384

    def __init__(
        self,
        inner: KvTransport,
        host: str,
        thresholds: Thresholds,
        limits: StagingLimits | None = None,
        *,
        memory: Memory = HOST_MEMORY,
    ) -> None:
        limits = limits or StagingLimits()
        self.name = inner.name
        self.quiet_after_failure_s = inner.quiet_after_failure_s
        self.memory = memory
        self.byte_limit = limits.loan_bytes
        self.pending_limit = limits.slots
        self.inner = inner
        if memory.on_host:
            self.direct_entries_max = thresholds.few_entries
            self.direct_bytes_min = thresholds.long_bytes
        else:
            self.direct_entries_max = 0 if memory.staged else sys.maxsize
            self.direct_bytes_min = sys.maxsize
        self._host = host
        self._limits = limits
        self._ranges = MemoryRanges()
        self._server: ScatterServer | None = None
        self._slots = BufferSlots(limits.staging_slots)
        # Allocated and registered by the first gather.
        self._staging: Bytes | None = None
        self._planner = StagingPlanner(thresholds)
        # Held while the filter of the server's port changes.
        self._admit_lock = threading.Lock()
        self._admitted: Networks | None = None
        self._clients = ScatterClients(limits)
        self._closed = False

    @property
    def session(self) -> str:
        if self._server is None:
            with self._admit_lock:
                self._server = ScatterServer(
                    self._host, self._ranges, self._limits, self.memory, self._admitted
                )
            area = self._server.landing
            self.inner.register(int(area.ctypes.data), area.nbytes)
        part = LANDING_ONLY if self.memory.staged else _SERVER_PART
        return join_sessions({self.name: self.inner.session, part: self._server.session})

    def register(self, base_address: int, nbytes: int) -> None:
        self.memory.admit(base_address, nbytes)
        if not self.memory.staged:
            self.inner.register(base_address, nbytes)
        self._ranges.add(base_address, nbytes)

    def admit(self, networks: Networks | None) -> None:
        with self._admit_lock:
            self._admitted = networks
            if self._server is not None:
                self._server.admit(networks)
        self.inner.admit(networks)

    def source_addresses(self, sessions: Collection[str]) -> frozenset[Address]:
        return self.inner.source_addresses(sessions)

    def submit_costly(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        deadline_s = time.monotonic() + timeout_s
        if self._closed:
            return failed_future(TransferFailed("the transport is closed"))
        if timeout_s <= 0.0:
            return failed_future(TransferFailed("no time is left for this write"))
        if not self._ranges.covers(runs.source_addresses, runs.lengths):
            return failed_future(TransferFailed("a source address is not registered"))
        if not (runs.lengths > 0).all():
            runs = runs.select(np.flatnonzero(runs.lengths))
        try:
            plan, client = self._plan(session, runs, timeout_s)
        except TransferFailed as error:
            return failed_future(error)
        write = StagedWrite(session, plan.strategy, self.inner.wire, deadline_s)
        try:
            self._start(write, plan, client, runs)
        except HeadraceError as error:
            write.end_part(error)
        except BaseException as error:
            write.end_part(TransferFailed(f"staging met a bug: {error}"))
            raise
        else:
            write.end_part(None)
        return write.future

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Fails the writes in flight; afterwards nothing uses a client.
        self.inner.close()
        self._clients.close()
        if self._server is not None:
            self._server.close()

    def _plan(
        self, session: str, runs: Runs, timeout_s: float
    ) -> tuple[StagingPlan, ScatterClient | None]:
        """The plan for this peer, and the client that it needs."""
        server, direct = _server_of(session)
        allowed: set[Strategy] = {"gather"} if direct else set()
        if direct and not self.memory.staged:
            allowed.add("direct")
        landing: set[Strategy] = (
            {"gather_scatter"} if self.memory.staged else {"scatter", "gather_scatter"}
        )
        if server and self._clients.may_connect(session):
            plan = self._planner.plan(runs, frozenset(allowed | landing))
            if plan.strategy not in landing:
                return plan, None
            client = self._clients.connect(session, server, timeout_s)
            if client is not None:
                return plan, client
        if not allowed:
            raise TransferFailed(
                "the peer lends no landing slots, which its memory cannot do without"
            )
        return self._planner.plan(runs, frozenset(allowed)), None

    def _start(
        self, write: StagedWrite, plan: StagingPlan, client: ScatterClient | None, runs: Runs
    ) -> None:
        if plan.strategy == "direct":
            self._submit_part(_Part(write, runs, self._slots), runs)
            return
        if plan.direct is not None:
            direct = runs.select(plan.direct)
            self._submit_part(_Part(write, direct, self._slots), direct)
        staged = runs if plan.staged is None else runs.select(plan.staged)
        for chunk in staged.batches(_RUNS_PER_SLOT, self._limits.slot_bytes):
            if write.failed:
                return
            part = _Part(write, chunk, self._slots, client)
            try:
                entries = self._stage(part, client, gather=plan.strategy != "scatter")
            except BaseException:
                part.release_unused()
                raise
            self._submit_part(part, entries)

    def _stage(self, part: _Part, client: ScatterClient | None, *, gather: bool) -> Runs:
        """Waits for the slots of a part and fills its staging slot. Returns the entries to be written."""
        runs = part.runs
        sources, destinations = runs.source_addresses, runs.destination_addresses
        packed = runs.lengths.cumsum() - runs.lengths
        if client is not None:
            destinations = part.acquire_landing(client) + packed
        if gather:
            slot = part.acquire_staging()
            start_ns = time.monotonic_ns()
            sources = self._gather(slot, runs) + packed
            part.write.add_gather_ns(time.monotonic_ns() - start_ns)
        return Runs(sources, destinations, runs.lengths).merge().split(_ENTRY_BYTES)

    def _gather(self, slot: int, runs: Runs) -> int:
        """Copies runs to a staging slot and returns its address."""
        slot_bytes = self._limits.slot_bytes
        if self._staging is None:
            self._staging = self.memory.allocate(self._limits.staging_slots * slot_bytes)
            self.inner.register(int(self._staging.ctypes.data), self._staging.nbytes)
        target = self._staging[slot * slot_bytes : (slot + 1) * slot_bytes]
        self.memory.gather(runs.source_addresses, runs.lengths, target)
        return int(target.ctypes.data)

    def _submit_part(self, part: _Part, entries: Runs) -> None:
        write = part.write
        write.start_part(len(entries))
        try:
            future = self.inner.submit(write.session, entries, write.deadline_s - time.monotonic())
        except Exception as error:  # noqa: BLE001 - fails the write like any other error
            future = failed_future(TransferFailed(f"writing met a bug: {error}"))
        future.add_done_callback(part.end_on_writer_thread)


@lru_cache(maxsize=1024)
def _server_of(session: str) -> tuple[str, bool]:
    """The scatter server in a peer's session, "" without one, and whether the peer can be written to directly."""
    if "=" not in session:
        return "", True
    only = session_of(LANDING_ONLY, session)
    return (only, False) if only else (session_of(_SERVER_PART, session) or "", True)


@dataclass(frozen=True, eq=False, slots=True)
class StagingPlan:
    """A strategy for the runs `staged`, in that order; None stands for all runs as listed.

    The runs `direct` are so long that they are written one by one. Both are indices of runs, which do not depend on the
    absolute addresses: the same runs, moved, share a plan.
    """

    strategy: Strategy
    staged: Int64Array | None
    direct: Int64Array | None


_Key = tuple[int, int, int, int, frozenset[Strategy]]


class StagingPlanner:
    """Keeps the last plans. One thread calls `plan`."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        # With the lengths, so that the id of the array cannot be reused.
        self._cache: Recent[_Key, tuple[Int64Array, StagingPlan]] = Recent(_CACHE_SIZE)

    def plan(self, runs: Runs, allowed: frozenset[Strategy]) -> StagingPlan:
        """A plan of the allowed strategies. Runs that CopyPlanner moved share a plan."""
        if not len(runs):
            return plan_staging(self._thresholds, runs, allowed)
        source, destination = runs.source_addresses, runs.destination_addresses
        key = (
            id(runs.lengths),
            len(runs),
            int(source[-1] - source[0]),
            int(destination[-1] - destination[0]),
            allowed,
        )
        found = self._cache.get(key)
        if found is None:
            found = runs.lengths, plan_staging(self._thresholds, runs, allowed)
            self._cache[key] = found
        return found[1]


def plan_staging(thresholds: Thresholds, runs: Runs, allowed: frozenset[Strategy]) -> StagingPlan:
    """Separates the long runs if "direct" is allowed, and chooses for the others. `allowed` must not be empty."""
    direct: Int64Array | None = None
    staged: Int64Array | None = None
    rest = runs
    if "direct" in allowed:
        long: NDArray[np.bool_] = runs.lengths >= thresholds.long_bytes
        if long.all():
            return StagingPlan("direct", None, None)
        if long.any():
            direct, staged = np.flatnonzero(long), np.flatnonzero(~long)
            rest = runs.select(staged)
    strategy = choose_strategy(thresholds, rest, allowed)
    if strategy == "direct":
        return StagingPlan("direct", None, None)
    inner = _staging_order(strategy, rest)
    if inner is not None:
        staged = inner if staged is None else staged[inner]
    return StagingPlan(strategy, staged, direct)


def choose_strategy(thresholds: Thresholds, runs: Runs, allowed: frozenset[Strategy]) -> Strategy:
    """The simplest allowed strategy with cheap entries. Where there is none, the one with the fewest entries."""
    entries: dict[Strategy, int] = {"direct": len(runs)}
    nbytes = runs.payload_bytes
    if not ("direct" in allowed and thresholds.are_cheap(len(runs), nbytes)):
        entries["gather"] = extent_count(runs.destination_addresses, runs.lengths)
        entries["scatter"] = extent_count(runs.source_addresses, runs.lengths)
        entries["gather_scatter"] = 1
    possible = {name: count for name, count in entries.items() if name in allowed}
    for name, count in possible.items():
        if thresholds.are_cheap(count, nbytes):
            return name
    return min(possible, key=possible.__getitem__)


def extent_count(addresses: Int64Array, lengths: Int64Array) -> int:
    """Contiguous ranges that the runs fill on one side, whatever their order."""
    if len(addresses) < 2:
        return len(addresses)
    if np.all(lengths == lengths[0]):
        # Sorting values is several times quicker than finding their order.
        return 1 + int(np.count_nonzero(np.diff(np.sort(addresses)) != lengths[0]))
    if not np.all(addresses[1:] > addresses[:-1]):
        order = np.argsort(addresses)
        addresses, lengths = addresses[order], lengths[order]
    return 1 + int(np.count_nonzero(addresses[1:] != addresses[:-1] + lengths[:-1]))


def _staging_order(strategy: Strategy, runs: Runs) -> Int64Array | None:
    """The order in which neighbours are adjacent. For "gather_scatter", an order that makes copies fast."""
    if strategy == "gather_scatter":
        return by_length(runs.lengths)
    addresses = runs.destination_addresses if strategy == "gather" else runs.source_addresses
    if bool((addresses[1:] >= addresses[:-1]).all()):
        return None
    return np.argsort(addresses, kind="stable")
