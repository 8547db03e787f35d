"""Decode ranks of one host pass on to each other what one of them was sent.

The ledger says what is due, a thread of its own copies it, and the receiver counts it. The copies write into a
reservation as prefill ranks do: its blocks are not reused before they have ended (I1).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    Draining,
    HeadraceError,
    InternalError,
    TransferFailed,
    TransferTimeout,
)
from headrace_kv.handoff.leases import Quarantine, QuarantinePolicy
from headrace_kv.handoff.messages import Reservation, reserved_span
from headrace_kv.layout.layout import KvDescriptor, RankMemory
from headrace_kv.plan.copy_plan import CopyPlanner, Runs, Span
from headrace_kv.receive.ledger import LocalCopy
from headrace_kv.receive.transfer import IncomingTransfer

_log = logging.getLogger(__name__)

JOB_BYTES = 64 * 1024 * 1024
"""What one transfer copies before the next one has its turn."""
WRITE_RUNS = 512
WRITE_BYTES = 8 * 1024 * 1024
"""Between two writes a copy may be ended."""

LocalWrite = Callable[[RankMemory, RankMemory, Runs, float], object]
"""Copies runs from one rank's memory to another's within some seconds, or raises HeadraceError."""


def copy_in_process(
    source: RankMemory, destination: RankMemory, runs: Runs, timeout_s: float
) -> None:
    """A LocalWrite between ranks whose memory lies in this process."""
    for source_address, destination_address, length in zip(
        runs.source_addresses.tolist(),
        runs.destination_addresses.tolist(),
        runs.lengths.tolist(),
        strict=True,
    ):
        ctypes.memmove(destination_address, source_address, length)


@dataclass(frozen=True, slots=True)
class LocalJob:
    """Copies of one transfer, to be made in order until `cancelled` is set or the deadline has passed."""

    reservation: Reservation
    copies: tuple[LocalCopy, ...]
    deadline: Deadline
    cancelled: threading.Event


class LocalBroadcast:
    """Copies between the ranks of one decode worker, on a thread of its own.

    `write` moves the bytes; after it failed, more may land for `quiet_after_failure_s`. `job_limit` bounds the jobs
    that wait. `submit` is called by one thread.
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

    def submit(self, job: LocalJob) -> Future[None]:
        """Queues a job; nothing of it writes any more when the future is done.

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
        """Drops what waits and returns when nothing is copied any more. Blocks; may be called twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: LocalJob) -> None:
        spans: dict[tuple[int, int, int], Span] = {}
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

    def _copy(self, job: LocalJob, copy: LocalCopy, span: Span) -> None:
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


class LocalCopyJobs:
    """Hands the copies that are due to a broadcast, at most one job per transfer at a time. Runs on one event loop.

    `on_step(transfer, error)` is called after each job.
    """

    def __init__(
        self,
        broadcast: LocalBroadcast,
        on_step: Callable[[IncomingTransfer, HeadraceError | None], None],
    ) -> None:
        self._broadcast = broadcast
        self._on_step = on_step

    def advance(self, transfer: IncomingTransfer) -> None:
        """Starts on what is due, if anything. Raises as LocalBroadcast.submit does."""
        if transfer.copying or transfer.ledger is None:
            return
        copies = transfer.ledger.take_local(JOB_BYTES)
        if not copies:
            return
        loop = asyncio.get_running_loop()
        job = LocalJob(transfer.reservation, copies, transfer.deadline, transfer.ended_locally)
        future = self._broadcast.submit(job)
        transfer.copying = True
        future.add_done_callback(lambda done: self._call_soon(loop, transfer, copies, done))

    def _call_soon(
        self,
        loop: asyncio.AbstractEventLoop,
        transfer: IncomingTransfer,
        copies: tuple[LocalCopy, ...],
        done: Future[None],
    ) -> None:
        # A loop that is gone has nobody left who waits for the transfer.
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, transfer, copies, done)

    def _ended(
        self, transfer: IncomingTransfer, copies: tuple[LocalCopy, ...], done: Future[None]
    ) -> None:
        transfer.copying = False
        error = _error_of(done)
        if error is None and transfer.ledger is not None:
            try:
                for copy in copies:
                    transfer.ledger.land_local(copy)
            except InternalError as unexpected:
                error = unexpected
        elif error is not None and self._broadcast.quiet_after_failure_s:
            policy = QuarantinePolicy(0.0, self._broadcast.quiet_after_failure_s)
            now_s = asyncio.get_running_loop().time()
            transfer.quarantines.append(Quarantine(policy, now_s))
        self._on_step(transfer, error)


def _error_of(done: Future[None]) -> HeadraceError | None:
    if done.cancelled():
        return Draining("the decode worker copies nothing any more")
    error = done.exception()
    if error is None or isinstance(error, HeadraceError):
        return error
    _log.error("a local copy failed", exc_info=error)
    return InternalError(f"a local copy failed: {error}")
