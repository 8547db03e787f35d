"""A transport that stages short runs where that is cheaper than to write them one by one.

"gather": runs are copied into staging memory in the destination's order and written in long entries. "scatter": runs
are written in long entries into slots of the peer's landing area, and the peer copies them into place (scatter.proto).
"gather_scatter": both. Thresholds (strategy.py) decide. Several slots on either side let gather, write and
scatter overlap within a write and between writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from headrace_common.errors import HeadraceError, TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import (
    KvTransport,
    Strategy,
    WriteResult,
    failed_future,
    join_sessions,
    session_of,
    wait_for_write,
)
from headrace_kv.transport.guard import Address, Networks
from headrace_kv.transport.memory import HOST_MEMORY, Memory, MemoryRanges
from headrace_kv.transport.staging.buffer import StagedWrite, StagingBuffer, packed_addresses
from headrace_kv.transport.staging.scatter_client import ScatterClient, ScatterClients
from headrace_kv.transport.staging.scatter_server import LandingLimits, ScatterServer
from headrace_kv.transport.staging.strategy import (
    StagingPlan,
    StagingPlanner,
    Thresholds,
    select,
)

# The session part of the scatter server: of memory that can also be written to directly, and of memory that cannot.
_SERVER_PART, _ONLY_SERVER_PART = "scatter", "landing"
_SCATTER_TIMEOUT_S = 10.0
_RUNS_PER_SLOT = 65_536
# Of gathered bytes on their way to the landing area. Several entries are in flight at once.
_ENTRY_BYTES = 1024 * 1024

OnDone = Callable[[HeadraceError | None], None]


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """Staging memory has `staging_slots` of the landing area's slot size.

    These are more than a peer lends, so that no peer occupies all of them. A peer that lends no slots is asked again
    after `retry_s`.
    """

    landing: LandingLimits = field(default_factory=LandingLimits)
    staging_slots: int = 6
    retry_s: float = 10.0


class StagedTransport(KvTransport):
    """Another transport, of which runs may be staged.

    Device memory that the inner transport cannot reach (`memory.staged`) is always staged. Device memory that it
    reaches is written directly where the peer's memory allows, because a gather would cost the device's time.
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
        self.byte_limit = limits.landing.loan_bytes
        self.pending_limit = limits.landing.slots
        self._inner = inner
        self._host = host
        self._landing = limits.landing
        self._ranges = MemoryRanges()
        self._server: ScatterServer | None = None
        self._staging = StagingBuffer(
            memory, limits.staging_slots, limits.landing.slot_bytes, inner.register
        )
        self._planner = StagingPlanner(thresholds)
        # Held while the filter of the server's port changes.
        self._admit_lock = threading.Lock()
        self._admitted: Networks | None = None
        self._clients = ScatterClients(limits.landing, limits.retry_s)
        self._closed = False

    @property
    def session(self) -> str:
        if self._server is None:
            with self._admit_lock:
                self._server = ScatterServer(
                    self._host, self._ranges, self._landing, self.memory, self._admitted
                )
            area = self._server.landing
            self._inner.register(int(area.ctypes.data), area.nbytes)
        part = _ONLY_SERVER_PART if self.memory.staged else _SERVER_PART
        return join_sessions({self.name: self._inner.session, part: self._server.session})

    def register(self, base_address: int, nbytes: int) -> None:
        self.memory.admit(base_address, nbytes)
        if not self.memory.staged:
            self._inner.register(base_address, nbytes)
        self._ranges.add(base_address, nbytes)

    def admit(self, networks: Networks | None) -> None:
        with self._admit_lock:
            self._admitted = networks
            if self._server is not None:
                self._server.admit(networks)
        self._inner.admit(networks)

    def source_addresses(self, sessions: Collection[str]) -> frozenset[Address]:
        return self._inner.source_addresses(sessions)

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        return wait_for_write(self.submit(session, runs, timeout_s), timeout_s)

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        deadline_s = time.monotonic() + timeout_s
        if self._closed:
            return failed_future(TransferFailed("the transport is closed"))
        if timeout_s <= 0.0:
            return failed_future(TransferFailed("no time is left for this write"))
        if not self._ranges.covers(runs.source_addresses, runs.lengths):
            return failed_future(TransferFailed("a source address is not registered"))
        if not (runs.lengths > 0).all():
            runs = select(runs, np.flatnonzero(runs.lengths))
        try:
            plan, client = self._plan(session, runs, timeout_s)
        except TransferFailed as error:
            return failed_future(error)
        write = StagedWrite(plan.strategy, self._inner.name)
        try:
            self._start(write, session, plan, client, runs, deadline_s)
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
        self._inner.close()
        self._clients.close()
        if self._server is not None:
            self._server.close()

    def _plan(
        self, session: str, runs: Runs, timeout_s: float
    ) -> tuple[StagingPlan, ScatterClient | None]:
        """The plan for this peer, and the client that it needs."""
        server, direct = _server_of(session)
        if direct and not self.memory.staged and not self.memory.on_host:
            return StagingPlan("direct", None, None), None
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
        self,
        write: StagedWrite,
        session: str,
        plan: StagingPlan,
        client: ScatterClient | None,
        runs: Runs,
        deadline_s: float,
    ) -> None:
        if plan.strategy == "direct":
            self._send(write, session, runs, deadline_s, write.end_part)
            return
        if plan.direct is not None:
            direct = select(runs, plan.direct)
            self._send(write, session, direct, deadline_s, write.end_part)
        staged = runs if plan.staged is None else select(runs, plan.staged)
        for chunk in staged.batches(_RUNS_PER_SLOT, self._landing.slot_bytes):
            if write.failed:
                return
            if client is None:
                self._send_gathered(write, session, chunk, deadline_s)
            else:
                gather = plan.strategy == "gather_scatter"
                self._send_scattered(write, session, chunk, deadline_s, client, gather)

    def _send_gathered(
        self, write: StagedWrite, session: str, chunk: Runs, deadline_s: float
    ) -> None:
        gathered = self._staging.gather(chunk, deadline_s)
        write.add_times(gather_ns=gathered.copy_ns, wait_ns=gathered.wait_ns)
        staged = packed_addresses(gathered.address, chunk.lengths)
        entries = Runs(staged, chunk.destination_addresses, chunk.lengths).merge()
        on_done = _released_first(partial(self._staging.release, gathered.slot), write.end_part)
        self._send(write, session, entries, deadline_s, on_done)

    def _send_scattered(
        self,
        write: StagedWrite,
        session: str,
        chunk: Runs,
        deadline_s: float,
        client: ScatterClient,
        gather: bool,
    ) -> None:
        start_ns = time.monotonic_ns()
        landing_slot = client.slots.acquire(deadline_s)
        write.add_times(wait_ns=time.monotonic_ns() - start_ns)
        landing = client.landing.address + landing_slot * client.landing.slot_bytes

        def on_landed(error: HeadraceError | None) -> None:
            if error is None:
                # To copy one slot takes milliseconds: an unresponsive peer need not cost the whole timeout.
                scatter_s = min(deadline_s, time.monotonic() + _SCATTER_TIMEOUT_S)
                client.submit(landing_slot, chunk, scatter_s, write.end_part)
                return
            # Late bytes may land in the slot: the peer must quarantine it before it lends it again.
            client.abort(f"a write to its slots failed: {error.detail}")
            write.end_part(error)

        if not gather:
            landings = packed_addresses(landing, chunk.lengths)
            entries = Runs(chunk.source_addresses, landings, chunk.lengths).merge()
            self._send(write, session, entries, deadline_s, on_landed)
            return
        try:
            gathered = self._staging.gather(chunk, deadline_s)
        except BaseException:
            client.slots.release(landing_slot)
            raise
        write.add_times(gather_ns=gathered.copy_ns, wait_ns=gathered.wait_ns)
        entries = _long_entries(gathered.address, landing, chunk.payload_bytes)
        on_done = _released_first(partial(self._staging.release, gathered.slot), on_landed)
        self._send(write, session, entries, deadline_s, on_done)

    def _send(
        self,
        write: StagedWrite,
        session: str,
        entries: Runs,
        deadline_s: float,
        on_done: OnDone,
    ) -> None:
        """Submits entries to the inner transport as a part of the write. Calls `on_done` once."""
        write.start_part()
        try:
            future = self._inner.submit(session, entries, deadline_s - time.monotonic())
        except Exception as error:  # noqa: BLE001 - fails the write like any other error
            future = failed_future(TransferFailed(f"writing met a bug: {error}"))

        def on_written(future: Future[WriteResult]) -> None:
            error = future.exception()
            if error is None:
                write.add_result(future.result())
            elif not isinstance(error, HeadraceError):
                error = TransferFailed(f"writing met a bug: {error}")
            on_done(error)

        future.add_done_callback(on_written)


def _long_entries(source: int, destination: int, nbytes: int) -> Runs:
    offsets = np.arange(0, nbytes, _ENTRY_BYTES, dtype=np.int64)
    return Runs(source + offsets, destination + offsets, np.minimum(nbytes - offsets, _ENTRY_BYTES))


def _server_of(session: str) -> tuple[str, bool]:
    """The scatter server in a peer's session, "" without one, and whether the peer can be written to directly."""
    if "=" not in session:
        return "", True
    only = session_of(_ONLY_SERVER_PART, session)
    return (only, False) if only else (session_of(_SERVER_PART, session) or "", True)


def _released_first(release: Callable[[], None], on_done: OnDone) -> OnDone:
    def both(error: HeadraceError | None) -> None:
        release()
        on_done(error)

    return both
