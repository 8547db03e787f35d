"""Decode's side of digests: what has landed is read back on a thread before the engine may run (I3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from headrace_common.errors import Draining, HeadraceError, InternalError, KvCorrupt
from headrace_kv.handoff.checksum import DigestMode, destination_digest, digest_share
from headrace_kv.handoff.messages import Reservation, reserved_span
from headrace_kv.layout.layout import KvDescriptor
from headrace_kv.plan.copy_plan import CopyPlanner
from headrace_kv.plan.shard_map import Edge
from headrace_kv.receive.transfer import IncomingTransfer, LandedPiece
from headrace_kv.transport.memory import HOST_MEMORY, Memory

_log = logging.getLogger(__name__)

_NAMED_LIMIT = 8


class DigestChecks:
    """Reads pieces of `descriptor`'s memory back, on a thread of its own.

    `memory` is how this process reads it. Prefill workers of `mismatch_limit` broken transfers are to be distrusted.
    """

    def __init__(
        self,
        descriptor: KvDescriptor,
        mode: DigestMode,
        *,
        memory: Memory = HOST_MEMORY,
        mismatch_limit: int = 3,
    ) -> None:
        self.share = digest_share(mode)
        self.mismatch_limit = mismatch_limit
        self._layout = descriptor.layout
        self._ranks = {rank.rank: rank for rank in descriptor.ranks}
        self._memory = memory
        self._planners: dict[int, CopyPlanner] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")

    def submit(
        self, reservation: Reservation, pieces: tuple[LandedPiece, ...]
    ) -> Future[tuple[LandedPiece, ...]]:
        """The pieces whose bytes are not what was sent. Raises Draining once closed."""
        try:
            return self._thread.submit(self.find_broken, reservation, pieces)
        except RuntimeError as error:
            raise Draining("the decode worker checks nothing any more") from error

    def find_broken(
        self, reservation: Reservation, pieces: tuple[LandedPiece, ...]
    ) -> tuple[LandedPiece, ...]:
        """The same, at once. Blocks."""
        return tuple(piece for piece in pieces if self._digest(reservation, piece) != piece.digest)

    def close(self) -> None:
        """Drops what waits and returns when nothing is read any more. Blocks; may be called twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _digest(self, reservation: Reservation, piece: LandedPiece) -> int:
        edge, rank = piece.edge, piece.edge.destination_rank
        planner = self._planners.get(rank)
        if planner is None:
            planner = self._planners[rank] = CopyPlanner(self._ranks[rank], self._ranks[rank])
        head = edge.destination_head
        own = Edge(rank, rank, head, head, edge.head_count)
        index = self._layout.group_index(piece.layer)
        span = reserved_span(self._layout, reservation, index, piece.start_token, piece.end_token)
        return destination_digest(self._memory, planner.plan(own, piece.layer, span))


class DigestJobs:
    """Has landed pieces checked, at most one job per transfer at a time. Runs on one event loop.

    `on_step(transfer, error)` is called after each job.
    """

    def __init__(
        self,
        checks: DigestChecks,
        on_step: Callable[[IncomingTransfer, HeadraceError | None], None],
    ) -> None:
        self._checks = checks
        self._on_step = on_step

    def advance(self, transfer: IncomingTransfer) -> None:
        """Starts on what has landed, if anything. Raises as DigestChecks.submit does."""
        if transfer.checking or not transfer.unchecked:
            return
        pieces = tuple(transfer.unchecked)
        transfer.unchecked.clear()
        loop = asyncio.get_running_loop()
        future = self._checks.submit(transfer.reservation, pieces)
        transfer.checking = True
        future.add_done_callback(lambda done: self._call_soon(loop, transfer, pieces, done))

    def _call_soon(
        self,
        loop: asyncio.AbstractEventLoop,
        transfer: IncomingTransfer,
        pieces: tuple[LandedPiece, ...],
        done: Future[tuple[LandedPiece, ...]],
    ) -> None:
        # A loop that is gone has nobody left who waits for the transfer.
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, transfer, pieces, done)

    def _ended(
        self,
        transfer: IncomingTransfer,
        pieces: tuple[LandedPiece, ...],
        done: Future[tuple[LandedPiece, ...]],
    ) -> None:
        transfer.checking = False
        error: HeadraceError | None = None
        if done.cancelled():
            error = Draining("the decode worker checks nothing any more")
        elif (problem := done.exception()) is not None:
            _log.error("a digest could not be checked", exc_info=problem)
            error = InternalError(f"a digest could not be checked: {problem}")
        elif broken := done.result():
            error = _corrupt(transfer, broken)
        elif transfer.ledger is not None:
            for piece in pieces:
                transfer.ledger.note_checked(piece.key, piece.end_token)
        self._on_step(transfer, error)


def _corrupt(transfer: IncomingTransfer, broken: tuple[LandedPiece, ...]) -> KvCorrupt:
    named = "; ".join(map(str, broken[:_NAMED_LIMIT]))
    more = f" and {len(broken) - _NAMED_LIMIT} more" if len(broken) > _NAMED_LIMIT else ""
    what = f"what has landed of transfer {transfer.transfer_id} is not what was sent: {named}{more}"
    metadata = {"transfer_id": transfer.transfer_id, "keys": named + more}
    if transfer.prefill is not None:
        metadata["prefill"] = str(transfer.prefill)
    return KvCorrupt(what, metadata=metadata)
