"""The thread that submits writes to a Mooncake engine and polls their status.

Mooncake's blocking calls spin on a core that copying needs. So the thread submits entries one by one, within a window
per peer, and polls them between short sleeps.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol

from headrace_common.errors import HeadraceError, TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import WriteResult, host_of

_log = logging.getLogger(__name__)

_JOB_LIMIT = 256
_PAUSE_MIN_S = 20e-6
_PAUSE_MAX_S = 200e-6
# Time for writes to other peers to end before the engine is dropped.
_DRAIN_S = 0.25
# How long entries in flight may make no progress after their deadline, and how long they may take in all. A peer that
# reads slowly must not keep a write in flight until the kill timer ends this process (LateWriteGuard).
_LATE_STALL_S = 1.0
_LATE_MAX_S = 1.5
_CLOSE_TIMEOUT_S = 20.0
# Mooncake's own timeout for connecting is about a minute.
_CONNECT_TIMEOUT_S = 70.0


_WINDOW_ENTRIES = 256
# The library may return a failure as the largest unsigned number.
NO_BATCH: Final = (0, -1, (1 << 64) - 1)


class MooncakeEngine(Protocol):
    """The part of Mooncake's engine that is used."""

    def transfer_submit_write(
        self, session: str, source_address: int, destination_address: int, length: int
    ) -> int:
        """Starts a copy and returns its batch id."""

    def transfer_check_status(self, batch: int) -> int:
        """1 once done, 0 before, else failed. A batch that has ended must not be checked again."""


class WriteJob:
    """One write. Its entries are submitted in order and end in any order. Of the writing thread, once it has started.

    `entries` are the sources, destinations and lengths to be submitted, and `pending` the batches in flight.
    """

    def __init__(self, session: str, runs: Runs, deadline_s: float) -> None:
        some = runs.lengths > 0
        self.session = session
        self.entries = deque(
            zip(
                runs.source_addresses[some].tolist(),
                runs.destination_addresses[some].tolist(),
                runs.lengths[some].tolist(),
                strict=True,
            )
        )
        self.entry_count = len(self.entries)
        self.pending: deque[int] = deque()
        self.deadline_s = deadline_s
        self.future: Future[WriteResult] = Future()

    @property
    def host(self) -> str:
        """The peer's host, for messages: they do not show its ports."""
        return host_of(self.session)

    def submit(self, engine: MooncakeEngine, entry_limit: int) -> int:
        """Submits up to `entry_limit` entries and returns their number. Raises TransferFailed."""
        started = 0
        while self.entries and started < entry_limit:
            batch = engine.transfer_submit_write(self.session, *self.entries[0])
            if batch in NO_BATCH:
                raise TransferFailed(f"Mooncake took no write to {self.host}")
            self.entries.popleft()
            self.pending.append(batch)
            started += 1
        return started

    def poll(self, engine: MooncakeEngine) -> int:
        """Removes the entries at the front that have ended and returns their number. Raises TransferFailed."""
        ended = 0
        while self.pending:
            code = engine.transfer_check_status(self.pending[0])
            if code == 0:
                break
            if code != 1:
                # The entry stays pending: its bytes are not whole, and its batch must not be checked again.
                raise TransferFailed(f"Mooncake could not write to {self.host} (code {code})")
            self.pending.popleft()
            ended += 1
        return ended


class PeerWrites:
    """The writes to one session, oldest first, of which `pending_count` entries are in flight.

    `progress_s` is when an entry last started or ended, `first_deadline_s` the earliest deadline.
    """

    def __init__(self) -> None:
        self.jobs: deque[WriteJob] = deque()
        self.pending_count = 0
        self.progress_s = time.monotonic()
        self.first_deadline_s = math.inf

    def add(self, job: WriteJob) -> None:
        self.jobs.append(job)
        self.first_deadline_s = min(self.first_deadline_s, job.deadline_s)

    def advance(self, engine: MooncakeEngine, now_s: float) -> bool:
        """Submits entries of writes that are not late, within the peer's window, and polls.

        Returns whether an entry has started or ended. Raises TransferFailed.
        """
        before = self.pending_count
        for job in self.jobs:
            if job.entries and now_s < job.deadline_s and self.pending_count < _WINDOW_ENTRIES:
                self.pending_count += job.submit(engine, _WINDOW_ENTRIES - self.pending_count)
        progress = self.pending_count > before or self.poll(engine) > 0
        if progress:
            self.progress_s = now_s
        return progress

    def poll(self, engine: MooncakeEngine) -> int:
        """Counts the entries that have ended. Raises TransferFailed."""
        before = self.pending_count
        for job in self.jobs:
            if job.pending:
                self.pending_count -= job.poll(engine)
        return before - self.pending_count

    def remove(self, ended: Callable[[WriteJob], bool]) -> list[WriteJob]:
        """Removes and returns the writes without entries in flight that have ended."""
        found = [job for job in self.jobs if not job.pending and ended(job)]
        for job in found:
            self.jobs.remove(job)
        if found:
            self.first_deadline_s = min((job.deadline_s for job in self.jobs), default=math.inf)
        return found


class WriteWorker:
    """Owns a sending engine, which `open_engine` makes when there is none.

    Only the end of the engine surely stops a write. So a write that fails, or makes no progress for `stall_s`, costs
    the engine. Every other write to that peer fails too, and for `rest_s` new ones fail at once.

    At its deadline a write submits no more entries, and fails once those in flight have ended. A future raises
    TransferFailed, or what `open_engine` raises, when its write reads the source no more. `on_connect` is called with a
    session before the engine first connects to it, on a thread of its own.
    """

    def __init__(
        self,
        open_engine: Callable[[], MooncakeEngine],
        drop_engine: Callable[[], None],
        transport: str,
        *,
        stall_s: float,
        rest_s: float,
        on_connect: Callable[[str], None] = lambda session: None,
    ) -> None:
        self._open_engine = open_engine
        self._drop_engine = drop_engine
        self._on_connect = on_connect
        self._transport = transport
        self._stall_s = stall_s
        self._rest_s = rest_s
        self._engine: MooncakeEngine | None = None
        # `submit` bounds it.
        self._arrivals: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._peers: dict[str, PeerWrites] = {}
        self._failed_s: dict[str, float] = {}
        self._connecting: dict[str, Future[int]] = {}
        self._connected: set[str] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-write", daemon=True)
        self._thread.start()

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        """Queues a write. Must not be called during or after `close`."""
        job = WriteJob(session, runs, time.monotonic() + timeout_s)
        if timeout_s <= 0.0:
            job.future.set_exception(TransferFailed("no time is left for this write"))
            return job.future
        if not job.entries:
            job.future.set_result(WriteResult(self._transport, "direct", 0))
            return job.future
        while self._arrivals.qsize() >= _JOB_LIMIT:
            if time.monotonic() >= job.deadline_s:
                job.future.set_exception(TransferFailed(f"{_JOB_LIMIT} writes wait already"))
                return job.future
            time.sleep(_PAUSE_MAX_S)
        self._arrivals.put(job)
        return job.future

    def close(self) -> None:
        """Fails every write; afterwards nothing lands any more."""
        self._closed = True
        self._arrivals.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._serve()
            except Exception as error:  # noqa: BLE001 - every write must end
                _log.exception("the writing thread met a bug")
                self._fail_all(f"the writing thread met a bug: {error}")
        self._fail_all("the transport is closed")
        while not self._arrivals.empty():
            job = self._arrivals.get_nowait()
            if job is not None:
                job.future.set_exception(TransferFailed("the transport is closed"))

    def _serve(self) -> None:
        pause_s = _PAUSE_MIN_S
        while not self._closed:
            self._accept_arrivals()
            progress = False
            for session, peer in list(self._peers.items()):
                if session in self._peers:
                    progress |= self._advance(session, peer)
            if not self._peers:
                pause_s = _PAUSE_MIN_S
            elif not progress:
                time.sleep(pause_s)
                pause_s = min(2.0 * pause_s, _PAUSE_MAX_S)

    def _fail_all(self, detail: str) -> None:
        self._end_engine()
        for session in list(self._peers):
            self._fail_peer(session, detail)

    def _accept_arrivals(self) -> None:
        """Accepts the queued writes. Waits for one when there is nothing else to do."""
        while not self._peers or not self._arrivals.empty():
            job = self._arrivals.get()
            if job is None:
                return
            self._accept(job)

    def _accept(self, job: WriteJob) -> None:
        failed_s = self._failed_s.get(job.session)
        if failed_s is not None and time.monotonic() - failed_s < self._rest_s:
            job.future.set_exception(
                TransferFailed(
                    f"a write to {job.host} failed less than {self._rest_s:.0f} s ago; nothing was written",
                    metadata={"host": job.host},
                )
            )
            return
        self._failed_s.pop(job.session, None)
        self._peers.setdefault(job.session, PeerWrites()).add(job)

    def _advance(self, session: str, peer: PeerWrites) -> bool:
        """Submits and polls entries. Returns whether an entry has started or ended."""
        now_s = time.monotonic()
        try:
            engine = self._engine if session in self._connected else self._connect(peer.jobs[0])
            if engine is None:
                self._end_unconnected(session, peer, now_s)
                return False
            progress = peer.advance(engine, now_s)
        except HeadraceError as error:
            self._fail(session, error.detail)
            return True
        if progress:
            self._report_landed(session, peer)
        if not peer.jobs:
            return progress
        if now_s - peer.progress_s > self._stall_s:
            self._fail(session, f"{host_of(session)} has not moved for {self._stall_s:.0f} s")
        elif now_s >= peer.first_deadline_s:
            self._end_late(session, peer, now_s)
        return progress

    def _report_landed(self, session: str, peer: PeerWrites) -> None:
        """Ends the futures of the writes of which every entry has ended."""
        for job in peer.remove(lambda job: not job.entries):
            job.future.set_result(WriteResult(self._transport, "direct", job.entry_count))
        if not peer.jobs:
            del self._peers[session]

    def _connect(self, job: WriteJob) -> MooncakeEngine | None:
        """The engine once it is connected to a write's peer, else None. Raises TransferFailed.

        The first call to an unresponsive peer blocks for a minute, so a thread of its own makes it.
        """
        if self._engine is None:
            self._engine = self._open_engine()
        session = job.session
        connecting = self._connecting.get(session)
        if connecting is None:
            connecting = self._connecting[session] = Future()
            threading.Thread(
                target=_write_nothing,
                args=(self._engine, session, job.entries[0], connecting, self._on_connect),
                name="kv-open",
                daemon=True,
            ).start()
        if not connecting.done():
            return None
        del self._connecting[session]
        if connecting.exception() is not None or connecting.result() in NO_BATCH:
            raise TransferFailed(f"Mooncake does not reach {job.host}")
        self._connected.add(session)
        return self._engine

    def _end_unconnected(self, session: str, peer: PeerWrites, now_s: float) -> None:
        """Fails a peer that does not answer. Nothing has been submitted, so the engine stays."""
        if now_s >= min(peer.progress_s + self._stall_s, peer.first_deadline_s):
            self._failed_s[session] = now_s
            self._fail_peer(session, f"{host_of(session)} does not answer")

    def _end_late(self, session: str, peer: PeerWrites, now_s: float) -> None:
        """Fails late writes. Drops the engine only when their entries make no or slow progress: other peers use it."""
        for job in peer.remove(lambda job: now_s >= job.deadline_s):
            job.future.set_exception(
                TransferFailed(f"writing to {job.host} took longer than its time")
            )
        if not peer.jobs:
            del self._peers[session]
        elif now_s - max(peer.first_deadline_s, peer.progress_s) > _LATE_STALL_S:
            self._fail(
                session,
                f"writing to {host_of(session)} took longer than its time, and stands still",
            )
        elif now_s - peer.first_deadline_s > _LATE_MAX_S:
            self._fail(session, f"writing to {host_of(session)} took much longer than its time")

    def _fail(self, session: str, detail: str) -> None:
        """Drops the engine and fails all writes to one peer."""
        others = {name: peer for name, peer in self._peers.items() if name != session}
        self._drain(others)
        self._end_engine()
        self._failed_s[session] = time.monotonic()
        self._fail_peer(session, detail)
        for name, peer in others.items():
            if peer.pending_count:
                self._fail_peer(name, f"the engine was given up, because {detail}")
            else:
                self._report_landed(name, peer)

    def _drain(self, peers: dict[str, PeerWrites]) -> None:
        """Waits up to _DRAIN_S for the entries in flight to some peers."""
        end_s = time.monotonic() + _DRAIN_S
        while any(peer.pending_count for peer in peers.values()) and time.monotonic() < end_s:
            for peer in peers.values():
                try:
                    if self._engine is not None:
                        peer.poll(self._engine)
                except TransferFailed as error:
                    _log.info("%s, while another write was given up", error)
                    return
            time.sleep(_PAUSE_MAX_S)

    def _fail_peer(self, session: str, detail: str) -> None:
        for job in self._peers.pop(session).jobs:
            job.future.set_exception(TransferFailed(detail, metadata={"host": job.host}))

    def _end_engine(self) -> None:
        # Threads that connect reference the engine too.
        stuck = concurrent.futures.wait(
            self._connecting.values(), timeout=_CONNECT_TIMEOUT_S
        ).not_done
        if stuck:
            _log.warning("%d unanswered connections keep an engine alive", len(stuck))
        self._connecting.clear()
        self._connected.clear()
        # Dropping the last reference destroys the engine: only then has it surely stopped reading our memory.
        self._engine = None
        self._drop_engine()


def _write_nothing(
    engine: MooncakeEngine,
    session: str,
    entry: tuple[int, int, int],
    connecting: Future[int],
    on_connect: Callable[[str], None],
) -> None:
    """Writes zero bytes, which makes the engine connect to a peer."""
    try:
        on_connect(session)
        connecting.set_result(engine.transfer_submit_write(session, entry[0], entry[1], 0))
    except Exception as error:  # noqa: BLE001 - the worker handles it
        connecting.set_exception(error)
