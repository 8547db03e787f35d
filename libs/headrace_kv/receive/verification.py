"""Compares the digests of landed KV with those of the sender.

A thread reads the memory back, and the transfer completes only when all digests match (I3).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import numpy as np

from headrace_common.errors import (
    Draining,
    InternalError,
    KvCorrupt,
    ProtocolViolation,
    TransferFailed,
)
from headrace_common.process.events import EVENTS
from headrace_common.tasks import Recent, call_when_done
from headrace_kv.checksum import (
    DigestMode,
    destination_digest,
    digest_share,
    is_digested,
)
from headrace_kv.copy_plan import BlockSpan, CopyPlanner
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.messages import Reservation, reserved_span
from headrace_kv.receive.ledger import LayerLanded, name_numbers
from headrace_kv.receive.local_broadcast import ResumeTransfer
from headrace_kv.runs import Runs, concatenate
from headrace_kv.shard_map import Edge, Key, heads_held
from headrace_kv.transport.memory import HOST_MEMORY, WordSums

_log = logging.getLogger(__name__)

T = TypeVar("T")

_TRACKED_LIMIT = 1024
FAULT_WINDOW_S: Final = 3_600.0
INTACT_PER_FAULT: Final = 1_000
REJECTED_S: Final = 600.0
_REJECTED_MAX_S: Final = 86_400.0


@dataclass(slots=True)
class _Record:
    """Of one prefill worker. It is rejected until `until_s`, and was `rejections` times."""

    faults_s: list[float] = field(default_factory=list)
    intact: int = 0
    """Checks without a fault since the latest one, or since one was forgiven."""
    until_s: float = -math.inf
    detail: str = ""
    rejections: int = 0

    def add_fault(self, now_s: float, limit: int, detail: str) -> float:
        """Counts a fault. For how long it rejects the worker, 0 if it does not."""
        self.faults_s = [one for one in self.faults_s if now_s < one + FAULT_WINDOW_S]
        self.faults_s.append(now_s)
        self.intact = 0
        if now_s < self.until_s or not (self.rejections or len(self.faults_s) >= limit):
            return 0.0
        rejected_s = min(_REJECTED_MAX_S, REJECTED_S * 2.0**self.rejections)
        self.until_s, self.detail = now_s + rejected_s, detail
        self.rejections += 1
        return rejected_s

    def add_intact(self) -> None:
        """Counts a check without a fault."""
        self.intact += 1
        if self.intact >= INTACT_PER_FAULT and self.faults_s:
            self.intact = 0
            del self.faults_s[0]


class CorruptSenderTracker:
    """Rejects a prefill worker for a while after `limit` corrupt transfers.

    A fault counts for an hour, and until 1,000 checks without one have followed it. A transfer has a check or more.
    Once a worker has been rejected, its next fault rejects it again, for twice as long.
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._records: Recent[WorkerRef, _Record] = Recent(_TRACKED_LIMIT)

    @property
    def rejected(self) -> dict[WorkerRef, str]:
        """The rejected workers, and why."""
        now_s = self._clock()
        return {ref: one.detail for ref, one in self._records.items() if now_s < one.until_s}

    def record(self, ref: WorkerRef, detail: str) -> None:
        """Counts one corrupt transfer. `detail` is the reason if the worker is rejected for it."""
        found = self._records[ref] = self._records.get(ref) or _Record()
        rejected_s = found.add_fault(self._clock(), self._limit, detail)
        if rejected_s:
            _log.error("rejecting KV from %s for %g s: %s", ref, rejected_s, detail)
            EVENTS.alarm(f"no KV of {ref} is accepted: {detail}")

    def record_intact(self, ref: WorkerRef) -> None:
        """Counts a check that has found no fault."""
        found = self._records.get(ref)
        if found is not None:
            found.add_intact()

    def was_rejected(self, ref: WorkerRef) -> bool:
        """Whether a worker is or was rejected."""
        found = self._records.get(ref)
        return found is not None and found.rejections > 0

    def require_accepted(self, ref: WorkerRef) -> None:
        """Raises TransferFailed for a rejected worker: another one can send."""
        found = self._records.get(ref)
        if found is not None and self._clock() < found.until_s:
            raise TransferFailed(
                f"no KV of {ref} is accepted here: {found.detail}", metadata={"prefill": str(ref)}
            )


_NAMED_LIMIT = 8


class DigestChecks:
    """Reads ranges of `descriptor`'s memory back, on a thread of its own.

    `memory_of` gives a Memory with this process's access to that of a rank. With `word_sums`, digests are those, and
    any WordSums do. A prefill worker is rejected after `mismatch_limit` corrupt transfers.
    """

    def __init__(
        self,
        descriptor: KvDescriptor,
        mode: DigestMode,
        *,
        memory_of: Callable[[int], WordSums] = lambda rank: HOST_MEMORY,
        word_sums: bool = False,
        mismatch_limit: int = 3,
    ) -> None:
        self.share = digest_share(mode)
        self.corrupt_senders = CorruptSenderTracker(mismatch_limit)
        self._layout = descriptor.layout
        self._ranks = {rank.rank: rank for rank in descriptor.ranks}
        self.word_sums = word_sums
        self._memory_of = memory_of
        self._planners: dict[int, CopyPlanner] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")

    def checks(self, reservation: Reservation, resume: ResumeTransfer) -> RangeChecks:
        """The checks of a new transfer."""
        return RangeChecks(self, reservation, resume)

    def submit(
        self, reservation: Reservation, ranges: tuple[LayerLanded, ...], seed: int
    ) -> Future[tuple[LayerLanded, ...]]:
        """Finds the ranges that do not hold the bytes that were sent. `seed` is that of their transfer.

        Raises Draining once closed.
        """
        return self._submit(partial(self._find_corrupt, reservation, ranges, seed))

    def digest_blocks(self, block_ids: Sequence[int]) -> Future[list[tuple[int, ...]]]:
        """What each whole block of the first group holds, on all ranks. Equal bytes give equal values.

        Raises Draining once closed.
        """
        return self._submit(lambda: [self._digest_block(one) for one in block_ids])

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        try:
            return self._thread.submit(job)
        except RuntimeError as error:
            raise Draining("the decode worker checks nothing any more") from error

    def close(self) -> None:
        """Drops waiting jobs and returns when the running one has ended. Blocks; may be called twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _find_corrupt(
        self, reservation: Reservation, ranges: tuple[LayerLanded, ...], seed: int
    ) -> tuple[LayerLanded, ...]:
        return tuple(one for one in ranges if self._digest(reservation, one, seed) != one.digest)

    def _digest(self, reservation: Reservation, landed: LayerLanded, seed: int) -> int:
        edge, rank = landed.edge, landed.edge.destination_rank
        head = edge.destination_head
        own = Edge(rank, rank, head, head, edge.head_count)
        index = self._layout.group_index(landed.layer)
        span = reserved_span(self._layout, reservation, index, landed.start_token, landed.end_token)
        runs = self._planner(rank).plan(own, landed.layer, span)
        return self._digest_of(rank, runs, seed)

    def _digest_of(self, rank: int, runs: Runs, seed: int) -> int:
        return destination_digest(self._memory_of(rank), runs, seed, word_sum=self.word_sums)

    def _digest_block(self, block_id: int) -> tuple[int, ...]:
        group, ranks = self._layout.groups[0], self._layout.tensor_parallel_size
        blocks = np.array([block_id], dtype=np.int64)
        span = BlockSpan(0, group.block_tokens, blocks, 0, blocks, 0)
        found: list[int] = []
        for rank in self._ranks:
            edge = Edge(rank, rank, 0, 0, len(heads_held(rank % ranks, ranks, group.head_count)))
            layers = sorted(set(group.layers).intersection(self._layout.layers_of(rank)))
            runs = [self._planner(rank).plan(edge, layer, span) for layer in layers]
            found += [self._digest_of(rank, concatenate(runs), 0)] if runs else []
        return tuple(found)

    def _planner(self, rank: int) -> CopyPlanner:
        planner = self._planners.get(rank)
        if planner is None:
            planner = self._planners[rank] = CopyPlanner(self._ranks[rank], self._ranks[rank])
        return planner


class RangeChecks:
    """The digest checks of one transfer, submitted in at most one job at a time."""

    def __init__(
        self, checks: DigestChecks, reservation: Reservation, resume: ResumeTransfer
    ) -> None:
        self.word_sums = checks.word_sums
        self._checks = checks
        self._reservation = reservation
        self._resume = resume
        self._sender: WorkerRef | None = None
        self._waiting: list[LayerLanded] = []
        self._checking: tuple[LayerLanded, ...] = ()
        self._stopped = False

    @property
    def pending_keys(self) -> Collection[Key]:
        """Keys with ranges that are not checked."""
        return [landed.key for landed in (*self._checking, *self._waiting)]

    def missing(self) -> str:
        """Names the layers that are not checked, "" when there are none."""
        layers = sorted({layer for _, _, layer in self.pending_keys})
        return f"the check of {name_numbers('layer', layers)}" if layers else ""

    def land(self, landed: LayerLanded, sender: WorkerRef) -> None:
        """A range has landed. Raises ProtocolViolation when it must have a digest and has none."""
        transfer_id = self._reservation.transfer_id
        if not is_digested(self._checks.share, transfer_id, landed.layer):
            return
        if landed.digest is None:
            raise ProtocolViolation(
                f"rank {landed.edge.source_rank} of {sender} gave no digest of layer "
                f"{landed.layer} of {transfer_id}"
            )
        self._sender = sender
        self._waiting.append(landed)

    def start(self, seed: int) -> None:
        """Submits the ranges that wait, unless a job runs. Raises as DigestChecks.submit does."""
        if self._checking or not self._waiting:
            return
        ranges = tuple(self._waiting)
        future = self._checks.submit(self._reservation, ranges, seed)
        self._waiting.clear()
        self._checking = ranges
        call_when_done(future, self._on_job_ended)

    def stop(self) -> None:
        """The transfer has failed: what is found later does not count against its sender."""
        self._stopped = True

    def _on_job_ended(self, done: Future[tuple[LayerLanded, ...]]) -> None:
        # After an error the ranges stay pending, so that the transfer cannot complete.
        if done.cancelled():
            self._resume(Draining("the decode worker checks nothing any more"))
        elif (problem := done.exception()) is not None:
            _log.error("a digest could not be checked", exc_info=problem)
            self._resume(InternalError(f"a digest could not be checked: {problem}"))
        elif corrupt := done.result():
            if not self._stopped and self._sender is not None:
                self._checks.corrupt_senders.record(
                    self._sender, "too many of its transfers arrived corrupt"
                )
            self._resume(self._corrupt_error(corrupt))
        else:
            if self._sender is not None:
                self._checks.corrupt_senders.record_intact(self._sender)
            self._checking = ()
            self._resume(None)

    def _corrupt_error(self, corrupt: tuple[LayerLanded, ...]) -> KvCorrupt:
        transfer_id = self._reservation.transfer_id
        named = "; ".join(map(str, corrupt[:_NAMED_LIMIT]))
        if len(corrupt) > _NAMED_LIMIT:
            named += f" and {len(corrupt) - _NAMED_LIMIT} more"
        return KvCorrupt(
            f"what has landed of transfer {transfer_id} is not what was sent: {named}",
            metadata={"transfer_id": transfer_id, "keys": named, "prefill": str(self._sender)},
        )
