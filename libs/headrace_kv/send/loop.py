"""The sender's thread: the one place where a prefill rank's KV is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import (
    Draining,
    HeadraceError,
    InternalError,
    TransferFailed,
)
from headrace_kv.handoff.checksum import is_digested, source_digest
from headrace_kv.handoff.logits import logits_parts
from headrace_kv.handoff.messages import LayerRange, Reservation, TransferTarget
from headrace_kv.layout.layout import KvDescriptor, WorkerRef
from headrace_kv.send import proto as words
from headrace_kv.send.context import SenderContext
from headrace_kv.send.layer_write import LayerWrite
from headrace_kv.send.mailbox import SenderInbox
from headrace_kv.send.peer import SenderPeer
from headrace_kv.send.round_robin import RoundRobinQueue
from headrace_kv.send.stream import HandoffLink
from headrace_kv.send.transfer import OutgoingTransfer
from headrace_kv.send.write_window import PendingWrite, WriteWindow
from headrace_kv.transport.base import WriteResult

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
# Decode answers an Open at once; what takes longer was lost, or finds out by asking again that the transfer has ended.
_ASK_AGAIN_S = 1.0
_OVERDUE_S = 2.0


class SendLoop:
    """Runs on one SenderThread, except the `link_...` and `write_ended` methods, which only post to the inbox.

    Each turn takes commands, plans one piece or starts one write, and looks at the clock.
    """

    def __init__(self, parts: SenderContext, inbox: SenderInbox) -> None:
        self._parts = parts
        self._rank = parts.rank
        self._clock = parts.clock
        self._transport = parts.transport
        self._inbox = inbox
        self._peers: dict[WorkerRef, SenderPeer] = {}
        self._links: set[HandoffLink] = set()
        self._transfers: dict[str, tuple[OutgoingTransfer, SenderPeer]] = {}
        self._writes = WriteWindow(parts.transport, parts.clock)
        self._turns = RoundRobinQueue(self._writes.has_room)
        self._next_sweep_s = 0.0
        self._gave_up = False

    def link_ready(self, link: HandoffLink, descriptor: KvDescriptor) -> None:
        """See LinkEvents; so are the three below."""
        self._inbox.post(self._greet, link, descriptor)

    def link_reserved(
        self, link: HandoffLink, reservation: Reservation, message_bytes: int
    ) -> None:
        self._inbox.post(self._reserve, link, reservation, message_bytes)

    def link_cancelled(self, link: HandoffLink, cancel: handoff_pb2.Cancel) -> None:
        self._inbox.post(self._cancel, link, cancel)

    def link_ended(self, link: HandoffLink, error: HeadraceError) -> None:
        self._inbox.post(self._lose, link, error)

    def write_ended(self, pending: PendingWrite, future: Future[WriteResult]) -> None:
        """A transport is done with a write."""
        self._inbox.post(self._settle, pending, future, time.perf_counter_ns())

    @property
    def over(self) -> bool:
        """Whether the inbox is closed and every transfer is quiet.

        A transport that does not end its writes in time is not waited for: their transfers are never called quiet.
        """
        return self._gave_up or (not self._transfers and self._inbox.closed_and_empty)

    def wait_s(self, now_s: float) -> float:
        """How long there is nothing to do, unless something comes into the inbox."""
        if not self._turns.idle or self._inbox.has_commands:
            return 0.0
        return min(_IDLE_WAIT_S, max(0.0, self._next_sweep_s - now_s))

    def turn(self) -> None:
        """Takes what came in, and does one thing."""
        for method, arguments in self._inbox.take():
            self._guard(method, *arguments)
        self._guard(self._do_next)
        if self._clock.monotonic_s() >= self._next_sweep_s:
            self._sweep()
        if self._inbox.closed and self._writes.overdue(self._clock.monotonic_s(), _OVERDUE_S):
            _log.error("rank %d: the transport did not end its writes in time", self._rank)
            self._gave_up = True

    def close_links(self) -> tuple[Future[None], ...]:
        """Ends every stream; done when they have ended."""
        for peer in self._peers.values():
            peer.link.close()
        return tuple(link.ended for link in self._links)

    def _guard(self, method: Callable[..., None], *arguments: Any) -> None:
        """One transfer's bug must not end the sending of all others (I6)."""
        try:
            method(*arguments)
        except Exception:  # noqa: BLE001 - the thread outlives it
            _log.exception("rank %d: %s met a bug", self._rank, method.__name__)

    def open(self, target: TransferTarget) -> None:
        """Starts a transfer, and a stream if there is none to that worker yet."""
        deadline_s = self._clock.monotonic_s() + target.deadline_unix_s - self._clock.unix_s()
        transfer = OutgoingTransfer(target, deadline_s)
        peer = self._peers.get(target.decode)
        if peer is None:
            peer = self._connect(target)
        self._transfers[transfer.transfer_id] = (transfer, peer)
        peer.transfers[transfer.transfer_id] = transfer
        self._next_sweep_s = min(self._next_sweep_s, deadline_s)
        if peer.descriptor is not None:
            self._ask(transfer, peer)

    def _connect(self, target: TransferTarget) -> SenderPeer:
        link = self._parts.link(
            ref=self._parts.ref,
            rank=self._rank,
            layout=self._parts.layout,
            decode=target.decode,
            endpoint=target.handoff_endpoint,
            descriptors=self._parts.descriptors,
            loop=self._parts.loop,
            events=self,
            handshake_timeout_s=self._parts.handshake_timeout_s,
            clock=self._clock,
            tls=self._parts.tls,
        )
        peer = SenderPeer(link)
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

    def _ask(self, transfer: OutgoingTransfer, peer: SenderPeer) -> None:
        """Asks for the reservation, unless this rank's heads are all sent by other copies."""
        assert peer.descriptor is not None
        try:
            transfer.plan(self._rank, self._parts.layout, peer.descriptor.layout)
        except HeadraceError as error:
            self._fail(transfer, peer, error)
            return
        if transfer.idle:
            self._end(transfer, peer)
            return
        transfer.opened = True
        self._ask_for_reservation(transfer, peer)

    def _ask_for_reservation(self, transfer: OutgoingTransfer, peer: SenderPeer) -> None:
        transfer.ask_again_s = self._clock.monotonic_s() + _ASK_AGAIN_S
        self._next_sweep_s = min(self._next_sweep_s, transfer.ask_again_s)
        _say(transfer, peer, words.opening(transfer.transfer_id))

    def _reserve(self, link: HandoffLink, reservation: Reservation, message_bytes: int) -> None:
        transfer, peer = self._transfers.get(reservation.transfer_id, (None, None))
        if transfer is None or peer is None or peer.link is not link or transfer.stopped:
            return
        if not transfer.opened or transfer.reservation is not None:
            return
        transfer.control_bytes += message_bytes
        try:
            transfer.reserve(reservation)
        except HeadraceError as error:
            self._fail(transfer, peer, error)
            return
        self._advance(transfer, peer)

    def push(self, piece: LayerRange) -> None:
        """Queues a piece of an open transfer."""
        transfer, peer = self._transfers.get(piece.transfer_id, (None, None))
        if transfer is None or peer is None or transfer.stopped:
            self._inbox.forget_pieces(1)
            return
        transfer.pieces.append(piece)
        self._advance(transfer, peer)

    def push_logits(self, transfer_id: str, logits: bytes) -> None:
        """Takes an open transfer's logits."""
        transfer, peer = self._transfers.get(transfer_id, (None, None))
        if transfer is not None and peer is not None and not transfer.stopped:
            transfer.logits = logits
            self._advance(transfer, peer)

    def finish(self, transfer_id: str) -> None:
        """No more pieces come."""
        transfer, peer = self._transfers.get(transfer_id, (None, None))
        if transfer is not None and peer is not None and not transfer.stopped:
            transfer.finished = True
            self._advance(transfer, peer)

    def _advance(self, transfer: OutgoingTransfer, peer: SenderPeer) -> None:
        """Queues, completes or fails a transfer, according to what it has."""
        if transfer.reservation is None:
            return
        if transfer.owes_logits and transfer.logits:
            for part in logits_parts(transfer.transfer_id, transfer.logits):
                _say(transfer, peer, part)
            transfer.logits, transfer.owes_logits = None, False
        if transfer.queued:
            return
        if transfer.complete:
            self._commit(transfer, peer)
        elif transfer.pieces:
            transfer.queued = True
            peer.ready.append(transfer)
            self._turns.give(peer)
        elif transfer.finished and not transfer.writing:
            detail = f"the engine ended without {transfer.missing()}"
            self._fail(transfer, peer, TransferFailed(detail))

    def _do_next(self) -> None:
        """Plans a piece or starts a write, if there is one to which the transport can be put."""
        step = self._turns.next_step()
        if step is None:
            return
        peer, transfer, write = step
        if write is None:
            self._for(transfer, peer, self._take_piece)
        else:
            self._for(transfer, peer, self._write, write)

    def _for(
        self,
        transfer: OutgoingTransfer,
        peer: SenderPeer,
        step: Callable[..., None],
        *writes: LayerWrite,
    ) -> None:
        """Does a step of one transfer. What goes wrong fails it alone."""
        try:
            step(transfer, peer, *writes)
        except Exception as error:  # noqa: BLE001 - fails this transfer alone
            self._fail_with(transfer, peer, error)

    def _take_piece(self, transfer: OutgoingTransfer, peer: SenderPeer) -> None:
        """Plans a transfer's next piece."""
        piece = transfer.pieces.popleft()
        self._inbox.forget_pieces(1)
        for copy in transfer.copies(piece):
            destination = copy.edge.destination_rank
            planner = peer.planner(self._parts.memory, destination)
            runs = planner.plan(copy.edge, piece.layer, copy.span)
            session = peer.memory(destination).session
            write = LayerWrite(piece, copy, session, runs, self._transport)
            transfer.writing.append(write)
            peer.backlog.append((transfer, write))
        self._acknowledge(transfer, peer)

    def _write(self, transfer: OutgoingTransfer, peer: SenderPeer, write: LayerWrite) -> None:
        """Starts a copy's next batch, if there is a lease and time."""
        now_s = self._clock.monotonic_s()
        lease_s = peer.link.lease.remaining_s(now_s)
        if lease_s <= 0.0:
            raise TransferFailed(f"the write lease from {peer.link.decode} is over")
        if now_s >= transfer.deadline_s:
            raise transfer.too_late()
        timeout_s = min(lease_s, transfer.deadline_s - now_s)
        pending, future = self._writes.submit(transfer, peer, write, timeout_s)
        try:
            # While the transport is at it.
            if write.next_batch is None and is_digested(
                peer.link.digest_share, transfer.transfer_id, write.layer
            ):
                write.digest = source_digest(self._transport.memory, write.runs)
        finally:
            if future.done():
                self._settle(pending, future, time.perf_counter_ns())
            else:
                future.add_done_callback(partial(self.write_ended, pending))

    def _settle(self, pending: PendingWrite, future: Future[WriteResult], end_ns: int) -> None:
        """A write is over."""
        self._writes.remove(pending)
        self._turns.write_ended()
        transfer, peer = pending.transfer, pending.peer
        try:
            written = future.result()
        except Exception as error:  # noqa: BLE001 - fails this transfer alone
            quiet_s = self._clock.monotonic_s() + self._transport.quiet_after_failure_s
            transfer.quiet_s = max(transfer.quiet_s, quiet_s)
            self._fail_with(transfer, peer, error)
        else:
            pending.write.note(written, end_ns)
            if not transfer.stopped:
                self._for(transfer, peer, self._acknowledge)
        if transfer.stopped:
            self._end_when_quiet(transfer, peer)

    def _acknowledge(self, transfer: OutgoingTransfer, peer: SenderPeer) -> None:
        """Counts and tells what has landed, in the order in which it was planned."""
        while transfer.writing and transfer.writing[0].landed:
            write = transfer.writing.popleft()
            transfer.landed(write.copy, write.sent())
            layer = words.layer_done(transfer.transfer_id, write)
            transfer.control_bytes += words.enclosed_bytes(layer)
            peer.link.acknowledge(layer)
        self._advance(transfer, peer)

    def _commit(self, transfer: OutgoingTransfer, peer: SenderPeer) -> None:
        _say(transfer, peer, words.commit(transfer.transfer_id, transfer.payload_bytes))
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

    def _cancel(self, link: HandoffLink, cancel: handoff_pb2.Cancel) -> None:
        transfer, peer = self._transfers.get(cancel.transfer_id, (None, None))
        if transfer is None or peer is None or peer.link is not link:
            link.send(words.quiesced(cancel.transfer_id))
            return
        transfer.control_bytes += handoff_pb2.HandoffResponse(cancel=cancel).ByteSize()
        self._halt(transfer, peer, words.reason_from_peer(cancel.reason), cancel.detail, tell=False)

    def _lose(self, link: HandoffLink, error: HeadraceError) -> None:
        self._links.discard(link)
        peer = self._peer_of(link)
        if peer is None:
            return
        del self._peers[link.decode]
        for transfer in list(peer.transfers.values()):
            # Whoever cannot hear us learns from the end of the stream.
            transfer.opened = False
            self._halt(
                transfer, peer, words.reason_from_peer(error.reason), error.detail, tell=False
            )

    def _fail(self, transfer: OutgoingTransfer, peer: SenderPeer, error: HeadraceError) -> None:
        self._halt(transfer, peer, error.reason, error.detail, tell=True)

    def _fail_with(self, transfer: OutgoingTransfer, peer: SenderPeer, error: Exception) -> None:
        if not isinstance(error, HeadraceError):
            name = transfer.transfer_id
            _log.error("rank %d: sending %s met a bug", self._rank, name, exc_info=error)
            error = InternalError(f"sending met a bug: {error}")
        self._fail(transfer, peer, error)

    def _halt(
        self, transfer: OutgoingTransfer, peer: SenderPeer, reason: str, detail: str, *, tell: bool
    ) -> None:
        """Starts no more writes for a transfer; it is quiet once those under way can land no more."""
        if transfer.stopped:
            return
        transfer.stopped = True
        transfer.reason, transfer.detail = reason, detail
        self._inbox.forget_pieces(len(transfer.pieces))
        transfer.pieces.clear()
        transfer.writing.clear()
        if tell and transfer.opened:
            _say(transfer, peer, words.failed(transfer.transfer_id, reason, detail))
        self._end_when_quiet(transfer, peer)

    def _end_when_quiet(self, transfer: OutgoingTransfer, peer: SenderPeer) -> None:
        if transfer.pending_count:
            return
        if self._clock.monotonic_s() >= transfer.quiet_s:
            self._end(transfer, peer)
        else:
            self._next_sweep_s = min(self._next_sweep_s, transfer.quiet_s)

    def _sweep(self) -> None:
        """Ends transfers whose quiet time has passed and fails those whose deadline has."""
        now_s = self._clock.monotonic_s()
        self._next_sweep_s = now_s + _IDLE_WAIT_S
        for transfer, peer in list(self._transfers.values()):
            if transfer.stopped:
                self._guard(self._end_when_quiet, transfer, peer)
            elif now_s >= transfer.deadline_s:
                self._guard(self._fail, transfer, peer, transfer.too_late())
            elif transfer.opened and transfer.reservation is None and now_s >= transfer.ask_again_s:
                self._guard(self._ask_for_reservation, transfer, peer)
            else:
                self._next_sweep_s = min(self._next_sweep_s, transfer.deadline_s)

    def _end(self, transfer: OutgoingTransfer, peer: SenderPeer) -> None:
        """The transfer is quiet: tells decode, then the engine."""
        if self._transfers.pop(transfer.transfer_id, None) is None:
            return
        peer.transfers.pop(transfer.transfer_id, None)
        if transfer.opened:
            _say(transfer, peer, words.quiesced(transfer.transfer_id))
        self._inbox.forget_pieces(len(transfer.pieces))
        transfer.pieces.clear()
        self._inbox.forget(transfer.transfer_id)
        try:
            self._parts.on_quiet(transfer.report(self._rank))
        except Exception:  # noqa: BLE001 - the thread outlives it
            _log.exception(
                "rank %d: the engine refused the report of %s", self._rank, transfer.transfer_id
            )

    def _peer_of(self, link: HandoffLink) -> SenderPeer | None:
        peer = self._peers.get(link.decode)
        return peer if peer is not None and peer.link is link else None


def _say(transfer: OutgoingTransfer, peer: SenderPeer, request: handoff_pb2.HandoffRequest) -> None:
    transfer.control_bytes += request.ByteSize()
    peer.link.send(request)
