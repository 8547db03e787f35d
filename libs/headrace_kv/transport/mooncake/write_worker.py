"""The thread that feeds an engine with writes and asks how they go.

Engines that are waited for in their own calls spin on a core that copying needs. So entries are submitted one by one,
a window of them per peer, and looked at between short sleeps.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from headrace_common.errors import HeadraceError, TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.base import WriteResult

_log = logging.getLogger(__name__)

_WINDOW_ENTRIES = 256
_JOB_LIMIT = 256
_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 200e-6
# Writes to other peers get this long to end before an engine is given up.
_DRAIN_S = 0.25
# What is under way after its time may stand still for so long.
_LATE_STALL_S = 1.0
_CLOSE_TIMEOUT_S = 20.0
# Mooncake itself waits about a minute.
_OPENING_LIMIT_S = 70.0
# A library may return a failure as the largest unsigned number.
_NO_BATCH = (0, -1, (1 << 64) - 1)


class Engine(Protocol):
    """What is used of Mooncake's engine."""

    def transfer_submit_write(
        self, session: str, source_address: int, destination_address: int, length: int
    ) -> int:
        """Starts a copy and returns how to ask for it."""

    def transfer_check_status(self, batch: int) -> int:
        """1 once done, 0 before, else failed; what has ended must not be asked for again."""


class _Job:
    """One write. Its entries are submitted in order and end in any."""

    def __init__(self, session: str, runs: Runs, timeout_s: float) -> None:
        some = runs.lengths > 0
        self.session = session
        self.sources: list[int] = runs.source_addresses[some].tolist()
        self.destinations: list[int] = runs.destination_addresses[some].tolist()
        self.lengths: list[int] = runs.lengths[some].tolist()
        self.deadline_s = time.monotonic() + timeout_s
        self.position = 0
        self.pending: deque[int] = deque()
        self.future: Future[WriteResult] = Future()

    @property
    def submitted(self) -> bool:
        return self.position == len(self.lengths)

    def late(self, now_s: float) -> bool:
        return now_s >= self.deadline_s


class _Peer:
    """The writes to one session, oldest first."""

    def __init__(self) -> None:
        self.jobs: deque[_Job] = deque()
        self.pending_count = 0
        self.progress_s = time.monotonic()


class WriteWorker:
    """Owns an engine for sending; `open_engine` makes one when there is none.

    A write that fails, or stands still for `stall_s`, costs the engine: only without it do its bytes surely stop. Then
    every other write to that peer fails too, and for `rest_s` new ones fail at once. A write whose time is over begins
    no more entries and fails once those under way have ended. Futures raise TransferFailed, or
    what `open_engine` raises, when nothing of their write reads its source any more.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        drop_engine: Callable[[], None],
        transport: str,
        *,
        stall_s: float,
        rest_s: float,
    ) -> None:
        self._open_engine = open_engine
        self._drop_engine = drop_engine
        self._transport = transport
        self._stall_s = stall_s
        self._rest_s = rest_s
        self._engine: Engine | None = None
        self._arrivals: queue.Queue[_Job | None] = queue.Queue(_JOB_LIMIT)
        self._peers: dict[str, _Peer] = {}
        self._failed_s: dict[str, float] = {}
        # To peers that the engine has not been in touch with yet.
        self._openings: dict[str, Future[int]] = {}
        self._opened: set[str] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-write", daemon=True)
        self._thread.start()

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        """Queues a write. Not to be called during or after `close`."""
        job = _Job(session, runs, timeout_s)
        if timeout_s <= 0.0:
            job.future.set_exception(TransferFailed("no time is left for this write"))
            return job.future
        if job.submitted:
            job.future.set_result(WriteResult(self._transport, "direct", 0))
            return job.future
        try:
            self._arrivals.put(job, timeout=timeout_s)
        except queue.Full:
            error = TransferFailed(f"{_JOB_LIMIT} writes wait already")
            job.future.set_exception(error)
        return job.future

    def close(self) -> None:
        """Fails what is under way; nothing lands any more afterwards."""
        self._closed = True
        self._arrivals.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._serve()
            except Exception as error:  # noqa: BLE001 - nobody may wait for a write for ever
                _log.exception("the writing thread met a bug")
                self._end_all(f"the writing thread met a bug: {error}")
        self._end_all("the transport is closed")
        while not self._arrivals.empty():
            job = self._arrivals.get_nowait()
            if job is not None:
                job.future.set_exception(TransferFailed("the transport is closed"))

    def _serve(self) -> None:
        pause_s = _SHORTEST_PAUSE_S
        while not self._closed:
            self._take()
            moved = False
            for session, peer in list(self._peers.items()):
                if session in self._peers:
                    moved |= self._advance(session, peer)
            if not self._peers:
                pause_s = _SHORTEST_PAUSE_S
            elif not moved:
                time.sleep(pause_s)
                pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    def _end_all(self, detail: str) -> None:
        self._give_up_engine()
        for session in list(self._peers):
            self._end_peer(session, detail)

    def _take(self) -> None:
        """Accepts what has arrived; waits for it when there is nothing else to do."""
        while not self._peers or not self._arrivals.empty():
            job = self._arrivals.get()
            if job is None:
                return
            self._accept(job)

    def _accept(self, job: _Job) -> None:
        failed_s = self._failed_s.get(job.session)
        if failed_s is not None and time.monotonic() - failed_s < self._rest_s:
            job.future.set_exception(
                TransferFailed(
                    f"a write to {job.session} failed less than {self._rest_s:.0f} s ago; nothing was written",
                    metadata={"session": job.session},
                )
            )
            return
        self._failed_s.pop(job.session, None)
        self._peers.setdefault(job.session, _Peer()).jobs.append(job)

    def _advance(self, session: str, peer: _Peer) -> bool:
        """Submits and looks; whether something has changed."""
        try:
            if not self._open_peer(session, peer.jobs[0]):
                self._end_unopened(session, peer)
                return False
            moved = self._submit(peer) + self._look(peer) > 0
        except HeadraceError as error:
            self._fail(session, error.detail)
            return True
        now_s = time.monotonic()
        if moved:
            peer.progress_s = now_s
        for job in [job for job in peer.jobs if job.submitted and not job.pending]:
            peer.jobs.remove(job)
            job.future.set_result(WriteResult(self._transport, "direct", len(job.lengths)))
        if not peer.jobs:
            del self._peers[session]
        elif now_s - peer.progress_s > self._stall_s:
            self._fail(session, f"{session} has not moved for {self._stall_s:.0f} s")
        else:
            self._end_late(session, peer, now_s)
        return moved

    def _open_peer(self, session: str, job: _Job) -> bool:
        """Whether the engine is in touch with a peer. One that stands still keeps the call that asks for a minute."""
        if session in self._opened:
            return True
        if self._engine is None:
            self._engine = self._open_engine()
        opening = self._openings.get(session)
        if opening is None:
            opening = self._openings[session] = Future()
            engine, addresses = self._engine, (job.sources[0], job.destinations[0])
            threading.Thread(
                target=_open,
                args=(engine, session, addresses, opening),
                name="kv-open",
                daemon=True,
            ).start()
        if not opening.done():
            return False
        del self._openings[session]
        if opening.exception() is not None or opening.result() in _NO_BATCH:
            raise TransferFailed(f"Mooncake does not reach {session}")
        self._opened.add(session)
        return True

    def _end_unopened(self, session: str, peer: _Peer) -> None:
        """Nothing has been submitted, so that the engine may stay."""
        now_s = time.monotonic()
        late_s = min(peer.progress_s + self._stall_s, *(job.deadline_s for job in peer.jobs))
        if now_s >= late_s:
            self._failed_s[session] = now_s
            self._end_peer(session, f"{session} does not answer")

    def _submit(self, peer: _Peer) -> int:
        engine = self._engine
        assert engine is not None
        begun = 0
        now_s = time.monotonic()
        for job in peer.jobs:
            if job.late(now_s):
                continue
            while not job.submitted and peer.pending_count < _WINDOW_ENTRIES:
                at = job.position
                batch = engine.transfer_submit_write(
                    job.session, job.sources[at], job.destinations[at], job.lengths[at]
                )
                if batch in _NO_BATCH:
                    raise TransferFailed(f"Mooncake took no write to {job.session}")
                job.pending.append(batch)
                job.position += 1
                peer.pending_count += 1
                begun += 1
        return begun

    def _look(self, peer: _Peer) -> int:
        engine = self._engine
        assert engine is not None
        ended = 0
        for job in peer.jobs:
            while job.pending:
                code = engine.transfer_check_status(job.pending[0])
                if code == 0:
                    break
                if code != 1:
                    # It stays pending: its write is not whole, and must not be asked for again.
                    raise TransferFailed(f"Mooncake could not write to {job.session} (code {code})")
                job.pending.popleft()
                peer.pending_count -= 1
                ended += 1
        return ended

    def _end_late(self, session: str, peer: _Peer, now_s: float) -> None:
        """Others would lose their writes with the engine, so it is only given up when the late ones stand still."""
        for job in [job for job in peer.jobs if job.late(now_s) and not job.pending]:
            peer.jobs.remove(job)
            job.future.set_exception(
                TransferFailed(f"writing to {session} took longer than its time")
            )
        if not peer.jobs:
            del self._peers[session]
            return
        first_s = min(job.deadline_s for job in peer.jobs)
        if now_s - max(first_s, peer.progress_s) > _LATE_STALL_S:
            self._fail(session, f"writing to {session} took longer than its time, and stands still")

    def _fail(self, session: str, detail: str) -> None:
        """Gives up the engine and all writes to one peer."""
        others = {name: peer for name, peer in self._peers.items() if name != session}
        self._drain(others)
        self._give_up_engine()
        self._failed_s[session] = time.monotonic()
        self._end_peer(session, detail)
        for name, peer in others.items():
            if peer.pending_count:
                self._end_peer(name, f"the engine was given up, because {detail}")

    def _drain(self, peers: dict[str, _Peer]) -> None:
        """Lets what is under way to some peers end, for a little while."""
        end_s = time.monotonic() + _DRAIN_S
        while any(peer.pending_count for peer in peers.values()) and time.monotonic() < end_s:
            for peer in peers.values():
                try:
                    self._look(peer)
                except TransferFailed as error:
                    _log.info("%s, while another write was given up", error)
                    return
            time.sleep(_LONGEST_PAUSE_S)

    def _end_peer(self, session: str, detail: str) -> None:
        for job in self._peers.pop(session).jobs:
            job.future.set_exception(TransferFailed(detail, metadata={"session": session}))

    def _give_up_engine(self) -> None:
        # Threads that wait for a peer's first answer hold it too.
        stuck = concurrent.futures.wait(self._openings.values(), timeout=_OPENING_LIMIT_S).not_done
        if stuck:
            _log.warning("%d peers keep an engine from being given up", len(stuck))
        self._openings.clear()
        self._opened.clear()
        # Dropping the last reference destroys the engine: only then has it surely stopped reading our memory.
        self._engine = None
        self._drop_engine()


def _open(engine: Engine, session: str, addresses: tuple[int, int], opening: Future[int]) -> None:
    """A write of nothing makes the engine get in touch with a peer."""
    try:
        opening.set_result(engine.transfer_submit_write(session, *addresses, 0))
    except Exception as error:  # noqa: BLE001 - the worker takes it from here
        opening.set_exception(error)
