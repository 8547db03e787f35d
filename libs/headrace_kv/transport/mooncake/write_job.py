"""One write to a Mooncake engine, and the writes to one peer. Plain state of the writing thread."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import Final, Protocol

from headrace_common.errors import TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import WriteResult, host_of

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
    """One write. Its entries are submitted in order and end in any order."""

    def __init__(self, session: str, runs: Runs, timeout_s: float) -> None:
        some = runs.lengths > 0
        self.session = session
        self.sources: list[int] = runs.source_addresses[some].tolist()
        self.destinations: list[int] = runs.destination_addresses[some].tolist()
        self.deadline_s = time.monotonic() + timeout_s
        self.future: Future[WriteResult] = Future()
        self._lengths: list[int] = runs.lengths[some].tolist()
        self._position = 0
        self._pending: deque[int] = deque()

    @property
    def host(self) -> str:
        """The peer's host, for messages: they do not show its ports."""
        return host_of(self.session)

    @property
    def entry_count(self) -> int:
        return len(self._lengths)

    @property
    def submitted(self) -> bool:
        """Whether every entry has been submitted."""
        return self._position == len(self._lengths)

    @property
    def pending_count(self) -> int:
        """Entries in flight."""
        return len(self._pending)

    def late(self, now_s: float) -> bool:
        return now_s >= self.deadline_s

    def submit(self, engine: MooncakeEngine, entry_limit: int) -> int:
        """Submits up to `entry_limit` entries and returns their number. Raises TransferFailed."""
        start = self._position
        while not self.submitted and self._position - start < entry_limit:
            at = self._position
            batch = engine.transfer_submit_write(
                self.session, self.sources[at], self.destinations[at], self._lengths[at]
            )
            if batch in NO_BATCH:
                raise TransferFailed(f"Mooncake took no write to {self.host}")
            self._pending.append(batch)
            self._position += 1
        return self._position - start

    def poll(self, engine: MooncakeEngine) -> int:
        """Removes the entries at the front that have ended and returns their number. Raises TransferFailed."""
        ended = 0
        while self._pending:
            code = engine.transfer_check_status(self._pending[0])
            if code == 0:
                break
            if code != 1:
                # The entry stays pending: its bytes are not whole, and its batch must not be checked again.
                raise TransferFailed(f"Mooncake could not write to {self.host} (code {code})")
            self._pending.popleft()
            ended += 1
        return ended


class PeerWrites:
    """The writes to one session, oldest first. `progress_s` is when an entry last started or ended."""

    def __init__(self) -> None:
        self.progress_s = time.monotonic()
        self._jobs: deque[WriteJob] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def oldest(self) -> WriteJob:
        return self._jobs[0]

    @property
    def pending_count(self) -> int:
        """Entries in flight."""
        return sum(job.pending_count for job in self._jobs)

    @property
    def first_deadline_s(self) -> float:
        """The earliest deadline of the writes."""
        return min(job.deadline_s for job in self._jobs)

    def add(self, job: WriteJob) -> None:
        self._jobs.append(job)

    def submit(self, engine: MooncakeEngine) -> int:
        """Submits entries of writes that are not late, within the peer's window. Raises TransferFailed."""
        started = 0
        now_s = time.monotonic()
        room = _WINDOW_ENTRIES - self.pending_count
        for job in self._jobs:
            if not job.late(now_s):
                started += job.submit(engine, room - started)
        return started

    def poll(self, engine: MooncakeEngine) -> int:
        """Counts the entries that have ended. Raises TransferFailed."""
        return sum(job.poll(engine) for job in self._jobs)

    def note_progress(self, now_s: float) -> None:
        self.progress_s = now_s

    def remove_done(self) -> list[WriteJob]:
        """Removes and returns the writes of which every entry has ended."""
        return self._remove([j for j in self._jobs if j.submitted and not j.pending_count])

    def remove_late(self, now_s: float) -> list[WriteJob]:
        """Removes and returns the late writes that have no entry in flight."""
        return self._remove([j for j in self._jobs if j.late(now_s) and not j.pending_count])

    def remove_all(self) -> list[WriteJob]:
        """Removes and returns every write."""
        return self._remove(list(self._jobs))

    def _remove(self, jobs: list[WriteJob]) -> list[WriteJob]:
        for job in jobs:
            self._jobs.remove(job)
        return jobs
