"""The sender's thread: the one place where a prefill rank's KV is written."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import (
    Draining,
    HeadraceError,
    InternalError,
    TransferFailed,
    TransferTimeout,
)
from headrace_kv.block_map import CopyPlanner, Runs
from headrace_kv.handoff_client import DescriptorSource, HandoffLink
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef
from headrace_kv.outgoing import Outgoing, PieceCopy
from headrace_kv.sender_inbox import SenderInbox
from headrace_kv.transfer import LayerPiece, LayerSent, Reservation, SendReport, TransferTarget
from headrace_kv.transport.base import KvTransport

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
_LINKS_END_S = 4.0


@dataclass(frozen=True, slots=True)
class SenderParts:
    """What a sender is made of, see RankSender."""

    ref: WorkerRef
    rank: int
    layout: KvLayout
    memory: RankMemory
    transport: KvTransport
    descriptors: DescriptorSource
    loop: asyncio.AbstractEventLoop
    on_quiet: Callable[[SendReport], None]
    handshake_timeout_s: float


class _Peer:
    """A decode worker incarnation, and what is cached about it. Owned by the sender's thread."""

    def __init__(self, link: HandoffLink) -> None:
        self.link = link
        self.descriptor: KvDescriptor | None = None
        self.transfers: dict[str, Outgoing] = {}
        self._planners: dict[int, CopyPlanner] = {}

    def planner(self, memory: RankMemory, destination_rank: int) -> CopyPlanner:
        planner = self._planners.get(destination_rank)
        if planner is None:
            planner = CopyPlanner(memory, self.memory(destination_rank))
            self._planners[destination_rank] = planner
        return planner

    def memory(self, destination_rank: int) -> RankMemory:
        ranks = self.descriptor.ranks if self.descriptor is not None else ()
        if destination_rank >= len(ranks):
            raise InternalError(f"{self.link.decode} describes no rank {destination_rank}")
        return ranks[destination_rank]


class SendLoop:
    """Runs on one thread, except the `link_...` methods, which only post to the inbox.

    Takes commands, sends one piece, looks at the clock, and again.
    """

    def __init__(self, parts: SenderParts, inbox: SenderInbox) -> None:
        self._parts = parts
        self._rank = parts.rank
        self._transport = parts.transport
        self._inbox = inbox
        self._peers: dict[WorkerRef, _Peer] = {}
        self._links: set[HandoffLink] = set()
        self._transfers: dict[str, tuple[Outgoing, _Peer]] = {}
        self._ready: deque[tuple[Outgoing, _Peer]] = deque()
        self._next_sweep_s = 0.0

    def link_ready(self, link: HandoffLink, descriptor: KvDescriptor) -> None:
        """See LinkEvents; so are the three below."""
        self._inbox.post(self._greet, link, descriptor)

    def link_reserved(self, link: HandoffLink, reservation: Reservation) -> None:
        self._inbox.post(self._reserve, link, reservation)

    def link_cancelled(self, link: HandoffLink, transfer_id: str, reason: str, detail: str) -> None:
        self._inbox.post(self._cancel, link, transfer_id, reason, detail)

    def link_ended(self, link: HandoffLink, error: HeadraceError) -> None:
        self._inbox.post(self._lose, link, error)

    def run(self) -> None:
        """Returns once the inbox is closed, every transfer is quiet and every stream has ended."""
        while self._transfers or not self._inbox.closed_and_empty:
            wait_s = 0.0
            if not self._ready:
                wait_s = min(_IDLE_WAIT_S, max(0.0, self._next_sweep_s - time.monotonic()))
            for method, arguments in self._inbox.take(wait_s):
                self._guard(method, *arguments)
            if self._ready:
                self._guard(self._send_next)
            if time.monotonic() >= self._next_sweep_s:
                self._sweep()
        for peer in self._peers.values():
            peer.link.close()
        concurrent.futures.wait([link.ended for link in self._links], timeout=_LINKS_END_S)

    def _guard(self, method: Callable[..., None], *arguments: Any) -> None:
        """One transfer's bug must not end the sending of all others (I6)."""
        try:
            method(*arguments)
        except Exception:  # noqa: BLE001 - the thread outlives it
            _log.exception("rank %d: %s met a bug", self._rank, method.__name__)

    def open(self, target: TransferTarget) -> None:
        """Starts a transfer, and a stream if there is none to that worker yet."""
        deadline_s = time.monotonic() + target.deadline_unix_s - time.time()
        transfer = Outgoing(target, deadline_s)
        peer = self._peers.get(target.decode)
        if peer is None:
            peer = self._connect(target)
        self._transfers[transfer.transfer_id] = (transfer, peer)
        peer.transfers[transfer.transfer_id] = transfer
        self._next_sweep_s = min(self._next_sweep_s, deadline_s)
        if peer.descriptor is not None:
            self._ask(transfer, peer)

    def _connect(self, target: TransferTarget) -> _Peer:
        link = HandoffLink(
            ref=self._parts.ref,
            rank=self._rank,
            layout=self._parts.layout,
            decode=target.decode,
            endpoint=target.handoff_endpoint,
            descriptors=self._parts.descriptors,
            loop=self._parts.loop,
            events=self,
            handshake_timeout_s=self._parts.handshake_timeout_s,
        )
        peer = _Peer(link)
        self._peers[target.decode] = peer
        self._links.add(link)
        link.start()
        return peer

    def _greet(self, link: HandoffLink, descriptor: KvDescriptor) -> None:
        peer = self._peer_of(link)
        if peer is None:
            return
        peer.descriptor = descriptor
        for transfer in list(peer.transfers.values()):
            if not transfer.stopped:
                self._ask(transfer, peer)

    def _ask(self, transfer: Outgoing, peer: _Peer) -> None:
        """Asks for the reservation, unless this rank's heads are all sent by other copies."""
        assert peer.descriptor is not None
        try:
            transfer.plan(self._rank, self._parts.layout, peer.descriptor.layout)
        except HeadraceError as error:
            self._fail(transfer, peer, error)
            return
        if transfer.edge_count == 0:
            self._end(transfer, peer)
            return
        transfer.opened = True
        peer.link.send(
            handoff_pb2.HandoffRequest(open=handoff_pb2.Open(transfer_id=transfer.transfer_id))
        )

    def _reserve(self, link: HandoffLink, reservation: Reservation) -> None:
        transfer, peer = self._transfers.get(reservation.transfer_id, (None, None))
        if transfer is None or peer is None or peer.link is not link or transfer.stopped:
            return
        if not transfer.opened or transfer.reservation is not None:
            return
        try:
            transfer.reserve(reservation)
        except HeadraceError as error:
            self._fail(transfer, peer, error)
            return
        self._advance(transfer, peer)

    def push(self, piece: LayerPiece) -> None:
        """Queues a piece of an open transfer."""
        transfer, peer = self._transfers.get(piece.transfer_id, (None, None))
        if transfer is None or peer is None or transfer.stopped:
            self._inbox.forget_pieces(1)
            return
        transfer.pieces.append(piece)
        self._advance(transfer, peer)

    def finish(self, transfer_id: str) -> None:
        """No more pieces come."""
        transfer, peer = self._transfers.get(transfer_id, (None, None))
        if transfer is not None and peer is not None and not transfer.stopped:
            transfer.finished = True
            self._advance(transfer, peer)

    def _advance(self, transfer: Outgoing, peer: _Peer) -> None:
        """Queues, completes or fails a transfer, according to what it has."""
        if transfer.reservation is None or transfer.queued:
            return
        if transfer.complete:
            self._commit(transfer, peer)
        elif transfer.pieces:
            transfer.queued = True
            self._ready.append((transfer, peer))
        elif transfer.finished:
            detail = f"the engine ended without {transfer.missing_layers()}"
            self._fail(transfer, peer, TransferFailed(detail))

    def _send_next(self) -> None:
        transfer, peer = self._ready.popleft()
        transfer.queued = False
        if transfer.stopped or not transfer.pieces:
            return
        piece = transfer.pieces.popleft()
        self._inbox.forget_pieces(1)
        try:
            for copy in transfer.copies(piece):
                self._send(transfer, peer, piece, copy)
        except HeadraceError as error:
            self._fail(transfer, peer, error)
        except Exception as error:  # noqa: BLE001 - fails this transfer alone
            _log.exception("rank %d: sending %s met a bug", self._rank, transfer.transfer_id)
            transfer.write_failed = True
            self._fail(transfer, peer, InternalError(f"sending met a bug: {error}"))
        else:
            self._advance(transfer, peer)

    def _send(self, transfer: Outgoing, peer: _Peer, piece: LayerPiece, copy: PieceCopy) -> None:
        edge = copy.edge
        start_unix_ns, start_ns = time.time_ns(), time.perf_counter_ns()
        planner = peer.planner(self._parts.memory, edge.destination_rank)
        runs = planner.plan(edge, piece.layer, copy.span)
        payload_bytes = runs.payload_bytes
        self._write(transfer, peer, peer.memory(edge.destination_rank).session, runs)
        sent = LayerSent(
            layer=piece.layer,
            destination_rank=edge.destination_rank,
            start_token=copy.start_token,
            end_token=copy.end_token,
            payload_bytes=payload_bytes,
            run_count=len(runs),
            ready_unix_ns=piece.ready_unix_ns,
            start_unix_ns=start_unix_ns,
            duration_ns=time.perf_counter_ns() - start_ns,
        )
        transfer.landed(copy, sent)
        peer.link.acknowledge(
            handoff_pb2.LayerDone(
                transfer_id=transfer.transfer_id,
                layer=piece.layer,
                destination_rank=edge.destination_rank,
                start_token=copy.start_token,
                end_token=copy.end_token,
                payload_bytes=payload_bytes,
            )
        )

    def _write(self, transfer: Outgoing, peer: _Peer, session: str, runs: Runs) -> None:
        for batch in runs.batches(self._transport.entry_limit, self._transport.byte_limit):
            now_s = time.monotonic()
            lease_s = peer.link.lease.remaining_s(now_s)
            if lease_s <= 0.0:
                raise TransferFailed(f"the write lease from {peer.link.decode} is over")
            if now_s >= transfer.deadline_s:
                raise _too_late(transfer)
            try:
                self._transport.write(session, batch, min(lease_s, transfer.deadline_s - now_s))
            except BaseException:
                transfer.write_failed = True
                raise

    def _commit(self, transfer: Outgoing, peer: _Peer) -> None:
        commit = handoff_pb2.Commit(
            transfer_id=transfer.transfer_id, payload_bytes=transfer.payload_bytes
        )
        peer.link.send(handoff_pb2.HandoffRequest(commit=commit))
        transfer.opened = False
        self._end(transfer, peer)

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        """Ends a transfer."""
        transfer, peer = self._transfers.get(transfer_id, (None, None))
        if transfer is not None and peer is not None:
            self._halt(transfer, peer, reason, detail, tell=True)

    def stop_all(self) -> None:
        """Ends every transfer."""
        for transfer_id in list(self._transfers):
            self.stop(transfer_id, Draining.reason, "the prefill rank is shutting down")

    def _cancel(self, link: HandoffLink, transfer_id: str, reason: str, detail: str) -> None:
        transfer, peer = self._transfers.get(transfer_id, (None, None))
        if transfer is None or peer is None or peer.link is not link:
            self._tell_quiesced(link, transfer_id)
            return
        self._halt(transfer, peer, reason or "CANCELLED", detail, tell=False)

    def _lose(self, link: HandoffLink, error: HeadraceError) -> None:
        self._links.discard(link)
        peer = self._peer_of(link)
        if peer is None:
            return
        del self._peers[link.decode]
        for transfer in list(peer.transfers.values()):
            # Whoever cannot hear us learns from the end of the stream.
            transfer.opened = False
            self._fail(transfer, peer, error)

    def _fail(self, transfer: Outgoing, peer: _Peer, error: HeadraceError) -> None:
        self._halt(transfer, peer, error.reason, error.detail, tell=True)

    def _halt(
        self, transfer: Outgoing, peer: _Peer, reason: str, detail: str, *, tell: bool
    ) -> None:
        """Writes nothing more for a transfer; it is quiet once what was written can have landed."""
        if transfer.stopped:
            return
        transfer.reason, transfer.detail = reason, detail
        self._inbox.forget_pieces(len(transfer.pieces))
        transfer.pieces.clear()
        if tell and transfer.opened:
            failed = handoff_pb2.Failed(
                transfer_id=transfer.transfer_id, reason=reason, detail=detail
            )
            peer.link.send(handoff_pb2.HandoffRequest(failed=failed))
        wait_s = self._transport.quiet_after_failure_s if transfer.write_failed else 0.0
        transfer.quiet_s = time.monotonic() + wait_s
        self._next_sweep_s = min(self._next_sweep_s, transfer.quiet_s)
        if wait_s <= 0.0:
            self._end(transfer, peer)

    def _sweep(self) -> None:
        """Ends transfers whose quiet time has passed and fails those whose deadline has."""
        now_s = time.monotonic()
        for transfer, peer in list(self._transfers.values()):
            if transfer.quiet_s is not None:
                if now_s >= transfer.quiet_s:
                    self._guard(self._end, transfer, peer)
            elif now_s >= transfer.deadline_s:
                self._guard(self._fail, transfer, peer, _too_late(transfer))
        times = [
            t.deadline_s if t.quiet_s is None else t.quiet_s for t, _ in self._transfers.values()
        ]
        self._next_sweep_s = min([now_s + _IDLE_WAIT_S, *times])

    def _end(self, transfer: Outgoing, peer: _Peer) -> None:
        """The transfer is quiet: tells decode, then the engine."""
        if self._transfers.pop(transfer.transfer_id, None) is None:
            return
        peer.transfers.pop(transfer.transfer_id, None)
        if transfer.opened:
            self._tell_quiesced(peer.link, transfer.transfer_id)
        self._inbox.forget_pieces(len(transfer.pieces))
        transfer.pieces.clear()
        self._inbox.forget(transfer.transfer_id)
        try:
            self._parts.on_quiet(transfer.report(self._rank))
        except Exception:  # noqa: BLE001 - the thread outlives it
            _log.exception(
                "rank %d: the engine refused the report of %s", self._rank, transfer.transfer_id
            )

    def _tell_quiesced(self, link: HandoffLink, transfer_id: str) -> None:
        quiesced = handoff_pb2.Quiesced(transfer_id=transfer_id)
        link.send(handoff_pb2.HandoffRequest(quiesced=quiesced))

    def _peer_of(self, link: HandoffLink) -> _Peer | None:
        peer = self._peers.get(link.decode)
        return peer if peer is not None and peer.link is link else None


def _too_late(transfer: Outgoing) -> TransferTimeout:
    if not transfer.planned:
        waited_for = f"the handshake with {transfer.target.decode}"
    elif transfer.reservation is None:
        waited_for = f"the reservation of {transfer.target.decode}"
    else:
        waited_for = transfer.missing_layers()
    return TransferTimeout(
        f"the deadline of {transfer.transfer_id} passed while waiting for {waited_for}",
        metadata={"transfer_id": transfer.transfer_id, "waited_for": waited_for},
    )
