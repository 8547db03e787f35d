"""What runs on a sender's thread: commands of the engine, events of the streams, writes, and the clock."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import Draining, HeadraceError
from headrace_kv.checksum import is_digested, source_digest
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.messages import LayerRange, Reservation, TransferTarget
from headrace_kv.send import proto
from headrace_kv.send.context import SenderContext
from headrace_kv.send.layer_write import LayerWrite
from headrace_kv.send.mailbox import SenderInbox
from headrace_kv.send.peer import SenderPeer, WriteObserver
from headrace_kv.send.stream import HandoffStream, HandoffStreamListener
from headrace_kv.send.transfer_table import SWEEP_INTERVAL_S, OutgoingTransfers
from headrace_kv.send.write_scheduler import WriteScheduler
from headrace_kv.transport.memory import Memory


class WriteDigests:
    """Computes the digest of a write's source bytes and adds it to the write's LayerDone.

    `share` is the part of all (transfer, layer) pairs that decode wants digests of.
    """

    def __init__(self, memory: Memory, share: float) -> None:
        self._memory = memory
        self._share = share
        # The digest of a write that is never acknowledged is freed with the write.
        self._digests: WeakKeyDictionary[LayerWrite, int] = WeakKeyDictionary()

    def on_all_started(self, transfer_id: str, write: LayerWrite, digest_seed: int) -> None:
        """Computes the digest while the transport is still sending the bytes."""
        if is_digested(self._share, transfer_id, write.layer):
            self._digests[write] = source_digest(self._memory, write.runs, digest_seed)

    def on_acknowledge(self, write: LayerWrite, message: handoff_pb2.LayerDone) -> None:
        """Adds the digest, if there is one."""
        digest = self._digests.get(write)
        if digest is not None:
            message.digest = digest


def requested_observers(welcome: handoff_pb2.Welcome, memory: Memory) -> tuple[WriteObserver, ...]:
    """The observers that a decode worker's Welcome asks for."""
    if welcome.digest_share > 0.0:
        return (WriteDigests(memory, welcome.digest_share),)
    return ()


_log = logging.getLogger(__name__)

_OVERDUE_S = 2.0

StreamFactory = Callable[[SenderContext, WorkerRef, str, HandoffStreamListener], HandoffStream]
"""Makes a stream as HandoffStream does."""


class SendLoop:
    """The one place where a prefill rank's KV is written. Runs on one SenderThread.

    Each turn calls the commands in the inbox, plans one range or starts one batch, and checks the deadlines.
    """

    def __init__(
        self,
        context: SenderContext,
        inbox: SenderInbox,
        make_stream: StreamFactory = HandoffStream,
    ) -> None:
        self._context = context
        self._inbox = inbox
        self._make_stream = make_stream
        self._listener = _PostedEvents(inbox, self)
        self._peers: dict[WorkerRef, SenderPeer] = {}
        self._table = OutgoingTransfers(context, inbox)
        self._scheduler = WriteScheduler(context, inbox, self._table)
        self._gave_up = False

    # Called by the thread.

    @property
    def over(self) -> bool:
        """Whether the inbox is closed and every transfer is quiet.

        Also when the transport does not end its writes in time. Their transfers are never reported as quiet.
        """
        return self._gave_up or (self._table.empty and self._inbox.closed_and_empty)

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next turn is due, unless a command is posted before."""
        if not self._scheduler.idle or self._inbox.has_commands:
            return 0.0
        return min(SWEEP_INTERVAL_S, max(0.0, self._table.next_sweep_s - now_s))

    def turn(self) -> None:
        """Calls the posted commands, and does one step of the writes."""
        for method, arguments in self._inbox.drain():
            self._guard(method, *arguments)
        self._guard(self._scheduler.run_step)
        now_s = self._context.clock.monotonic_s()
        if now_s >= self._table.next_sweep_s:
            for transfer in self._table.start_sweep(now_s):
                self._guard(self._table.check_times, transfer, now_s)
        if self._inbox.closed and self._scheduler.overdue(_OVERDUE_S):
            rank = self._context.rank
            _log.error("rank %d: the transport did not end its writes in time", rank)
            self._gave_up = True

    def _guard(self, method: Callable[..., None], *arguments: Any) -> None:
        """Calls `method` and logs what it raises: one transfer's bug must not end the others' sending (I6)."""
        try:
            method(*arguments)
        except Exception:  # noqa: BLE001 - the thread survives it
            _log.exception("rank %d: %s met a bug", self._context.rank, method.__name__)

    def close_streams(self) -> tuple[Future[None], ...]:
        """Closes every stream. The futures are done when the streams have ended."""
        streams = [peer.stream for peer in self._peers.values()]
        for stream in streams:
            stream.close()
        return tuple(stream.ended for stream in streams)

    # Commands, see RankSender.

    def open(self, target: TransferTarget) -> None:
        """Starts a transfer, and a stream if there is none to that worker yet."""
        peer = self._peers.get(target.decode)
        if peer is None:
            peer = self._connect(target)
        transfer = self._table.add(target, peer)
        if peer.layout is not None:
            self._table.open(transfer)

    def _connect(self, target: TransferTarget) -> SenderPeer:
        stream = self._make_stream(
            self._context, target.decode, target.handoff_endpoint, self._listener
        )
        peer = SenderPeer(self._context, stream)
        self._peers[target.decode] = peer
        stream.start()
        return peer

    def push(self, layer_range: LayerRange) -> None:
        """Queues a range of an open transfer."""
        transfer = self._table.find_running(layer_range.transfer_id)
        if transfer is None:
            self._inbox.ranges_removed(1)
            return
        transfer.range_pushed(layer_range)
        self._scheduler.advance(transfer)

    def push_hidden_state(self, transfer_id: str, state: bytes) -> None:
        """Stores an open transfer's hidden state until it can be sent."""
        transfer = self._table.find_running(transfer_id)
        if transfer is not None and transfer.hidden_state is not None:
            transfer.hidden_state.supply(state)
            self._scheduler.advance(transfer)

    def finish(self, transfer_id: str) -> None:
        """The engine pushes no more."""
        transfer = self._table.find_running(transfer_id)
        if transfer is not None:
            transfer.push_finished()
            self._scheduler.advance(transfer)

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        """Ends a transfer."""
        transfer = self._table.find_running(transfer_id)
        if transfer is not None:
            self._table.stop(transfer, reason, detail, notify_decode=True)

    def stop_all(self) -> None:
        """Ends every transfer."""
        for transfer in self._table.all():
            detail = "the prefill rank is shutting down"
            self._table.stop(transfer, Draining.reason, detail, notify_decode=True)

    # Events of the streams, see HandoffStreamListener.

    def on_ready(
        self, stream: HandoffStream, descriptor: KvDescriptor, welcome: handoff_pb2.Welcome
    ) -> None:
        peer = self._peer_of(stream)
        if peer is None:
            return
        observers = requested_observers(welcome, self._context.transport.memory)
        peer.stream_ready(descriptor, observers)
        for transfer in self._table.of_peer(peer):
            if not transfer.stopped:
                self._table.open(transfer)

    def on_reservation(
        self, stream: HandoffStream, reservation: Reservation, message_bytes: int
    ) -> None:
        transfer = self._table.find(reservation.transfer_id)
        if transfer is None or transfer.peer.stream is not stream:
            return
        if not transfer.awaits_reservation:
            return
        transfer.control_bytes_counted(message_bytes)
        try:
            transfer.reservation_received(reservation)
        except HeadraceError as error:
            self._table.fail(transfer, error)
        else:
            self._scheduler.advance(transfer)

    def on_cancel(self, stream: HandoffStream, cancel: handoff_pb2.Cancel) -> None:
        transfer = self._table.find(cancel.transfer_id)
        if transfer is None or transfer.peer.stream is not stream:
            stream.send(proto.quiesced(cancel.transfer_id))
            return
        transfer.control_bytes_counted(handoff_pb2.HandoffResponse(cancel=cancel).ByteSize())
        reason = proto.reason_from_peer(cancel.reason)
        self._table.stop(transfer, reason, cancel.detail, notify_decode=False)

    def on_lost(self, stream: HandoffStream, error: HeadraceError) -> None:
        peer = self._peer_of(stream)
        if peer is None:
            return
        del self._peers[stream.decode]
        reason = proto.reason_from_peer(error.reason)
        for transfer in self._table.of_peer(peer):
            transfer.stream_lost()
            self._table.stop(transfer, reason, error.detail, notify_decode=False)
        self._scheduler.remove_peer(peer)

    def _peer_of(self, stream: HandoffStream) -> SenderPeer | None:
        peer = self._peers.get(stream.decode)
        return peer if peer is not None and peer.stream is stream else None


class _PostedEvents:
    """Calls the listener of the same name on the sender's thread."""

    def __init__(self, inbox: SenderInbox, listener: HandoffStreamListener) -> None:
        self._inbox = inbox
        self._listener = listener

    def on_ready(
        self, stream: HandoffStream, descriptor: KvDescriptor, welcome: handoff_pb2.Welcome
    ) -> None:
        self._inbox.post(self._listener.on_ready, stream, descriptor, welcome)

    def on_reservation(
        self, stream: HandoffStream, reservation: Reservation, message_bytes: int
    ) -> None:
        self._inbox.post(self._listener.on_reservation, stream, reservation, message_bytes)

    def on_cancel(self, stream: HandoffStream, cancel: handoff_pb2.Cancel) -> None:
        self._inbox.post(self._listener.on_cancel, stream, cancel)

    def on_lost(self, stream: HandoffStream, error: HeadraceError) -> None:
        self._inbox.post(self._listener.on_lost, stream, error)
