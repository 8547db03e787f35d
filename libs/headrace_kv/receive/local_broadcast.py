"""Copies KV among the decode ranks of one host, so that the network carries it to one of them only.

A thread makes the copies that the local ledger reports as due. The copies write into a
reservation as prefill ranks do: its blocks are not reused before the copies have ended (I1).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    Draining,
    HeadraceError,
    InternalError,
    TransferFailed,
    TransferTimeout,
)
from headrace_common.tasks import call_when_done
from headrace_kv.copy_plan import BlockSpan, CopyPlanner, Runs
from headrace_kv.layout import KvDescriptor, RankMemory
from headrace_kv.messages import Reservation, reserved_span
from headrace_kv.receive.ledger import LayerLanded, LocalCopy, LocalLedger
from headrace_kv.shard_map import Key
from headrace_kv.transport.memory import gather, scatter

_log = logging.getLogger(__name__)

JOB_BYTES = 64 * 1024 * 1024
"""Bytes that one transfer copies before another transfer's job runs."""
WRITE_RUNS = 512
WRITE_BYTES = 8 * 1024 * 1024
"""Bounds of one write. A job can be cancelled between two writes."""


class ResumeTransfer(Protocol):
    """Continues a transfer on the receiver's event loop after a job of it has ended."""

    def __call__(self, error: HeadraceError | None, *, late_write_s: float = 0.0) -> None:
        """`error` fails the transfer. The job may still write into the blocks for `late_write_s`."""


LocalWrite = Callable[[RankMemory, RankMemory, Runs, float], object]
"""Copies runs from one rank's memory to another's within some seconds, or raises HeadraceError."""


def copy_in_process(
    source: RankMemory, destination: RankMemory, runs: Runs, timeout_s: float
) -> None:
    """A LocalWrite for ranks in this process."""
    copied = np.empty(runs.payload_bytes, np.uint8)
    gather(runs.source_addresses, runs.lengths, copied)
    scatter(copied, runs.destination_addresses, runs.lengths)


@dataclass(frozen=True, slots=True)
class LocalJob:
    """Copies of one transfer, made in order until `cancelled` is set or the deadline has passed."""

    reservation: Reservation
    copies: tuple[LocalCopy, ...]
    deadline: Deadline
    cancelled: threading.Event


class LocalBroadcast:
    """Copies between the ranks of one decode worker, on a thread of its own.

    `write` moves the bytes; after it failed, more may land for `quiet_after_failure_s`. At most `job_limit` jobs wait.
    One thread calls `submit`.
    """

    def __init__(
        self,
        descriptor: KvDescriptor,
        write: LocalWrite = copy_in_process,
        *,
        quiet_after_failure_s: float = 0.0,
        job_limit: int = 1024,
    ) -> None:
        self.quiet_after_failure_s = quiet_after_failure_s
        self._layout = descriptor.layout
        self._memories = {memory.rank: memory for memory in descriptor.ranks}
        self._write = write
        self._planners: dict[tuple[int, int], CopyPlanner] = {}
        self._room = threading.BoundedSemaphore(job_limit)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-broadcast")

    def copies(
        self, reservation: Reservation, deadline: Deadline, resume: ResumeTransfer
    ) -> LocalCopies:
        """The local copies of a new transfer."""
        return LocalCopies(self, LocalLedger(self._layout, reservation), deadline, resume)

    def submit(self, job: LocalJob) -> Future[None]:
        """Queues a job. It writes nothing after the future is done.

        The future raises Cancelled, or TransferFailed or TransferTimeout naming the layer and ranks. Raises
        TransferFailed when too many jobs wait, Draining once closed.
        """
        if not self._room.acquire(blocking=False):
            raise TransferFailed("too many local copies wait: take fewer requests at a time")
        try:
            future = self._thread.submit(self._run, job)
        except RuntimeError as error:
            self._room.release()
            raise Draining("the decode worker copies nothing any more") from error
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """Drops waiting jobs and returns when the running one has ended. Blocks; may be called twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: LocalJob) -> None:
        spans: dict[tuple[int, int, int], BlockSpan] = {}
        for copy in job.copies:
            index = self._layout.group_index(copy.layer)
            at = (index, copy.start_token, copy.end_token)
            span = spans.get(at)
            if span is None:
                span = spans[at] = reserved_span(
                    self._layout, job.reservation, index, copy.start_token, copy.end_token
                )
            try:
                self._copy(job, copy, span)
            except Cancelled:
                raise
            except HeadraceError as error:
                edge = copy.edge
                kind = TransferTimeout if job.deadline.expired else TransferFailed
                raise kind(
                    f"transfer {job.reservation.transfer_id}: {copy} could not be copied: {error.detail}",
                    metadata={
                        "layer": str(copy.layer),
                        "source_rank": str(edge.source_rank),
                        "destination_rank": str(edge.destination_rank),
                    },
                ) from error

    def _copy(self, job: LocalJob, copy: LocalCopy, span: BlockSpan) -> None:
        edge = copy.edge
        ranks = (edge.source_rank, edge.destination_rank)
        source, destination = (self._memories[rank] for rank in ranks)
        planner = self._planners.get(ranks)
        if planner is None:
            planner = self._planners[ranks] = CopyPlanner(source, destination)
        runs = planner.plan(edge, copy.layer, span)
        if runs.payload_bytes != copy.payload_bytes:
            raise InternalError(
                f"its plan has {runs.payload_bytes} bytes instead of {copy.payload_bytes}"
            )
        for batch in runs.batches(WRITE_RUNS, WRITE_BYTES):
            if job.cancelled.is_set():
                raise Cancelled(f"transfer {job.reservation.transfer_id} has ended")
            job.deadline.check("its turn")
            self._write(source, destination, batch, job.deadline.remaining_s())


class LocalCopies:
    """The local copies of one transfer, submitted to a broadcast in at most one job at a time."""

    def __init__(
        self,
        broadcast: LocalBroadcast,
        ledger: LocalLedger,
        deadline: Deadline,
        resume: ResumeTransfer,
    ) -> None:
        self.running = False
        """Whether a job may write into the blocks."""
        self._broadcast = broadcast
        self._ledger = ledger
        self._deadline = deadline
        self._resume = resume
        self._cancelled = threading.Event()

    @property
    def missing_keys(self) -> Collection[Key]:
        """Keys that are not copied to the end."""
        return self._ledger.missing_keys

    @property
    def copied_bytes(self) -> int:
        return self._ledger.copied_bytes

    def missing(self) -> str:
        """Names the missing keys, "" when there are none."""
        return self._ledger.missing()

    def land(self, landed: LayerLanded) -> None:
        """A range has landed."""
        self._ledger.land(landed)

    def start(self) -> None:
        """Submits the due copies, unless a job runs. Raises as LocalBroadcast.submit does."""
        if self.running:
            return
        copies = self._ledger.take_due(JOB_BYTES)
        if not copies:
            return
        job = LocalJob(self._ledger.reservation, copies, self._deadline, self._cancelled)
        future = self._broadcast.submit(job)
        self.running = True
        call_when_done(future, partial(self._on_job_ended, copies))

    def stop(self) -> None:
        """The transfer has failed: no further write begins."""
        self._cancelled.set()

    def _on_job_ended(self, copies: tuple[LocalCopy, ...], done: Future[None]) -> None:
        self.running = False
        error = _error_of(done)
        if error is not None:
            self._resume(error, late_write_s=self._broadcast.quiet_after_failure_s)
            return
        try:
            for copy in copies:
                self._ledger.count(copy)
        except InternalError as unexpected:
            error = unexpected
        self._resume(error)


def _error_of(done: Future[None]) -> HeadraceError | None:
    if done.cancelled():
        return Draining("the decode worker copies nothing any more")
    error = done.exception()
    if error is None or isinstance(error, HeadraceError):
        return error
    _log.error("a local copy failed", exc_info=error)
    return InternalError(f"a local copy failed: {error}")
