"""Sends one prefill rank's KV, layer by layer, and is the only user of its transport.

Any thread puts records into a rank's queue. A sender's thread handles them, and starts the writes that they allow.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import (
    Draining,
    DuplicateTransfer,
    HeadraceError,
    QueueFull,
    TransferFailed,
)
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import LayerRange, TransferTarget
from headrace_kv.send.stream import (
    CancelReceived,
    HandoffStream,
    ReservationReceived,
    SenderContext,
    SenderLimits,
    StreamEvent,
    StreamLost,
    StreamReady,
    reason_from_peer,
)
from headrace_kv.send.transfer import SWEEP_INTERVAL_S, OutgoingTransfer, OutgoingTransfers
from headrace_kv.send.writes import SenderPeer, WriteBatch
from headrace_kv.transport.memory import PASSED, Mark

_log = logging.getLogger(__name__)

_STREAMS_END_S = 4.0
_ENDING_POLL_S = 0.05
_OVERDUE_S = 2.0
_CLOSING = "the prefill rank is shutting down"
# The longest time between the device passing a mark and the range being sent, while the thread does nothing else.
_MARK_POLL_S = 50e-6


# Named tuples, since a frozen dataclass takes a microsecond more to make.


class Open(NamedTuple):
    """The engine starts a transfer."""

    target: TransferTarget


class Range(NamedTuple):
    """A layer range, which the device has written when `mark` is passed. It has until `written_by_s` for that."""

    transfer_id: str
    layer_range: LayerRange
    mark: Mark
    written_by_s: float


class HiddenState(NamedTuple):
    """The hidden state of the last token. `read` gives it once `mark` is passed, see Range."""

    transfer_id: str
    read: Callable[[], bytes]
    mark: Mark
    written_by_s: float


class Finish(NamedTuple):
    """The engine pushes no more."""

    transfer_id: str
    mark: Mark = PASSED
    written_by_s: float = 0.0


class Stop(NamedTuple):
    """The engine ends a transfer."""

    transfer_id: str
    reason: str
    detail: str


class Close(NamedTuple):
    """The engine ends every transfer, and starts no more."""


class Landed(NamedTuple):
    """The transport has ended a batch, at `end_ns` of time.monotonic_ns."""

    batch: WriteBatch
    end_ns: int


Pushed: TypeAlias = Range | HiddenState | Finish
Record: TypeAlias = Open | Pushed | Stop | Close | Landed | StreamEvent
MakeStream: TypeAlias = Callable[
    [SenderContext, WorkerRef, str, Callable[[StreamEvent], None]], HandoffStream
]


class SendLoop:
    """Handles the records of one rank, and has its streams, transfers and writes. Runs on one SenderThread.

    What the engine pushes for a transfer is used in order. What the device has not written yet waits, with all behind
    it. Each turn handles the records, starts the writes that have room, and checks the deadlines.
    """

    def __init__(self, context: SenderContext, sender: RankSender, make_stream: MakeStream) -> None:
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._context = context
        self._sender = sender
        self._make_stream = make_stream
        self._peers: dict[WorkerRef, SenderPeer] = {}
        self.transfers = OutgoingTransfers(
            context,
            on_end=sender.transfer_quiet,
            on_landed=lambda batch: sender.post(Landed(batch, time.monotonic_ns())),
        )
        self._unwritten: dict[str, deque[Pushed]] = {}
        self._has_more_writes = self._gave_up = False
        self.due_s = self._end_by_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether to call `run` now, at `now_s` of time.monotonic."""
        return self.due_s <= now_s or (not self._end_by_s and self._sender.has_records)

    def run(self) -> bool:
        """Takes a turn. Once the loop is over, ends the streams: False when they have ended, or took too long to."""
        if not self._end_by_s:
            try:
                self.turn()
                if not self.over:
                    self.due_s = time.monotonic() + self.wait_s()
                    return True
            except Exception:  # noqa: BLE001 - one loop's bug must not end the others of the thread
                _log.exception("a sender met a bug and sends no more")
            for peer in self._peers.values():
                peer.stream.close()
            self._end_by_s = time.monotonic() + _STREAMS_END_S
        now_s = time.monotonic()
        self.due_s = now_s + _ENDING_POLL_S
        streams = [peer.stream for peer in self._peers.values()]
        return now_s < self._end_by_s and not all(stream.ended.done() for stream in streams)

    @property
    def over(self) -> bool:
        """Whether the sender is closed and every transfer is quiet.

        Also when the transport does not end its writes in time. Their transfers are never reported as quiet.
        """
        closed = self._sender.closing and not self._sender.has_records
        return self._gave_up or (closed and not self.transfers.all())

    def wait_s(self) -> float:
        """Seconds until the next turn is due, unless a record comes before."""
        if self._has_more_writes or self._sender.has_records:
            return 0.0
        longest_s = _MARK_POLL_S if self._unwritten else SWEEP_INTERVAL_S
        now_s = self._context.clock.monotonic_s()
        return min(longest_s, max(0.0, self.transfers.next_sweep_s - now_s))

    def turn(self) -> None:
        """Handles the records, starts the writes that have room, and checks the deadlines."""
        records = self._sender.take_records()
        if self._unwritten:
            self._poll_marks()
        for record in records:
            try:
                self._handle(record)
            except Exception:  # noqa: BLE001 - one transfer's bug must not end the others' sending (I6)
                _log.exception("rank %d: %s met a bug", self._context.rank, type(record).__name__)
        self._has_more_writes = self.transfers.start_writes(lambda: self._sender.has_records)
        self.transfers.sweep()
        if self._sender.closing and self.transfers.writes.overdue(_OVERDUE_S):
            _log.error("rank %d: the transport's writes did not end in time", self._context.rank)
            self._gave_up = True

    def _handle(self, record: Record) -> None:
        match record:
            case Range() | HiddenState() | Finish():
                self._push(record)
            case Landed():
                self.transfers.land(record.batch, record.end_ns)
            case Open(target):
                self._open(target)
            case Stop(transfer_id, reason, detail):
                transfer = self.transfers.find(transfer_id)
                if transfer is not None:
                    self.transfers.stop(transfer, reason, detail)
            case Close():
                for transfer in self.transfers.all():
                    self.transfers.stop(transfer, Draining.reason, _CLOSING)
            case ReservationReceived():
                self._reserve(record)
            case CancelReceived():
                self._cancel(record)
            case StreamReady() | StreamLost():
                peer = self._peers.get(record.stream.decode)
                if peer is not None and peer.stream is record.stream:
                    self._change_stream(peer, record)

    def _open(self, target: TransferTarget) -> None:
        peer = self._peers.get(target.decode)
        if peer is None:
            stream = self._make_stream(
                self._context, target.decode, target.handoff_endpoint, self._sender.post
            )
            peer = self._peers[target.decode] = SenderPeer(self._context, stream)
            stream.start()
        self.transfers.add(target, peer)

    def _push(self, record: Pushed) -> None:
        waiting = self._unwritten.get(record.transfer_id)
        if waiting is not None:
            waiting.append(record)
        elif record.mark is PASSED or self._is_written(record):
            self._use(record)
        else:
            self._unwritten[record.transfer_id] = deque((record,))

    def _poll_marks(self) -> None:
        """Uses what the device has written since, in order for each transfer."""
        for transfer_id, waiting in list(self._unwritten.items()):
            while waiting and self._is_written(waiting[0]):
                self._use(waiting.popleft())
            if not waiting:
                del self._unwritten[transfer_id]

    def _is_written(self, record: Pushed) -> bool:
        """Whether the device has written the record, or its transfer is over. Fails it when that comes too late."""
        transfer = self.transfers.find_running(record.transfer_id)
        if transfer is None:
            return True
        what = (
            f"layer {record.layer_range.layer}" if isinstance(record, Range) else "the hidden state"
        )
        try:
            if record.mark.query():
                return True
            if self._context.clock.monotonic_s() < record.written_by_s:
                return False
            failure = f"the device did not write {what} in time"
        except Exception as error:  # noqa: BLE001 - fails this transfer alone
            failure = f"the device failed before {what} was written: {error}"
        _log.error("%s: %s", record.transfer_id, failure)
        self.transfers.stop(transfer, TransferFailed.reason, failure)
        return True

    def _use(self, record: Pushed) -> None:
        """Gives a transfer what the engine pushed, unless it is over."""
        transfer = self.transfers.find_running(record.transfer_id)
        if transfer is None:
            self.transfers.ranges_removed(isinstance(record, Range))
            return
        try:
            match record:
                case Range(_, layer_range, mark):
                    if mark is not PASSED:
                        layer_range = replace(layer_range, ready_ns=time.monotonic_ns())
                    transfer.range_pushed(layer_range)
                case HiddenState():
                    transfer.hidden_state_pushed(record.read())
                case Finish():
                    transfer.push_finished()
            self.transfers.advance(transfer)
        except Exception as error:  # noqa: BLE001 - fails this transfer alone
            self.transfers.fail(transfer, error)

    def _transfer_of(self, stream: HandoffStream, transfer_id: str) -> OutgoingTransfer | None:
        """The transfer, if it is one of that stream."""
        transfer = self.transfers.find(transfer_id)
        return transfer if transfer is not None and transfer.peer.stream is stream else None

    def _reserve(self, received: ReservationReceived) -> None:
        transfer = self._transfer_of(received.stream, received.reservation.transfer_id)
        if transfer is not None:
            try:
                transfer.reservation_received(received.reservation, received.message_bytes)
            except HeadraceError as error:
                self.transfers.fail(transfer, error)
            self.transfers.advance(transfer)

    def _cancel(self, received: CancelReceived) -> None:
        stream, cancel = received.stream, received.cancel
        transfer = self._transfer_of(stream, cancel.transfer_id)
        if transfer is None:
            quiesced = handoff_pb2.Quiesced(transfer_id=cancel.transfer_id)
            stream.send(handoff_pb2.HandoffRequest(quiesced=quiesced))
        else:
            transfer.message_received(handoff_pb2.HandoffResponse(cancel=cancel).ByteSize())
            reason = reason_from_peer(cancel.reason)
            self.transfers.stop(transfer, reason, cancel.detail, notify_decode=False)

    def _change_stream(self, peer: SenderPeer, event: StreamReady | StreamLost) -> None:
        if isinstance(event, StreamReady):
            peer.stream_ready(event.descriptor, event.digests)
            for transfer in self.transfers.all(peer):
                if not transfer.stopped:
                    self.transfers.open(transfer, event.descriptor.layout)
            return
        del self._peers[event.stream.decode]
        reason = reason_from_peer(event.error.reason)
        for transfer in self.transfers.all(peer):
            transfer.stream_lost()
            self.transfers.stop(transfer, reason, event.error.detail, notify_decode=False)
        self.transfers.writes.remove(peer)


class SenderThread:
    """Runs the send loops of one or several ranks, for as long as there are any.

    A write that blocks delays every loop of the thread, so a rank that sends much has a thread of its own. `changed`
    guards the queues of all the ranks, and is notified of each record.
    """

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()
        self._name = name
        self._loops: list[SendLoop] = []
        self._running = False

    def add(self, loop: SendLoop) -> None:
        """Runs a loop until it has ended."""
        with self.changed:
            self._loops.append(loop)
            self.changed.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while due := self._wait():
            for loop in due:
                if not loop.run():
                    with self.changed:
                        self._loops.remove(loop)
                    loop.ended.set_result(None)

    def _wait(self) -> list[SendLoop]:
        """Waits for loops that have something to do; empty when all have ended."""
        with self.changed:
            while self._loops:
                now_s = time.monotonic()
                due = [loop for loop in self._loops if loop.is_due(now_s)]
                if due:
                    return due
                self.changed.wait(min(loop.due_s for loop in self._loops) - now_s)
            self._running = False
            return []


class RankSender:
    """A rank's queue of records for its thread. Has one handoff stream per decode worker.

    The thread is its own unless `thread` is given. Every method may be called from any thread and does not block.
    """

    def __init__(
        self,
        context: SenderContext,
        *,
        limits: SenderLimits | None = None,
        thread: SenderThread | None = None,
        make_stream: MakeStream = HandoffStream,
    ) -> None:
        self.closing = False
        self._limits = limits or SenderLimits()
        self._clock = context.clock
        self._records: deque[Record] = deque()
        self._active: set[str] = set()
        self._overflowed: set[str] = set()
        self._pushed_ranges = 0
        thread = thread or SenderThread(f"kv-sender-{context.ref.worker_id}-{context.rank}")
        self._changed = thread.changed
        self._loop = SendLoop(context, self, make_stream)
        self.closed = self._loop.ended
        thread.add(self._loop)

    def open(self, target: TransferTarget) -> None:
        """Starts a transfer. The handshake runs while the prompt is computed.

        Raises DuplicateTransfer, QueueFull for too many transfers, or Draining after `close`.
        """
        transfer_id, limit = target.transfer_id, self._limits.transfers
        with self._changed:
            if self.closing:
                raise Draining("the sender is closing")
            if transfer_id in self._active:
                raise DuplicateTransfer(
                    f"transfer {transfer_id} is open already", metadata={"transfer_id": transfer_id}
                )
            if len(self._active) >= limit:
                raise QueueFull(
                    f"the sender has {limit} transfers already", metadata={"transfers": str(limit)}
                )
            self._active.add(transfer_id)
            self._post(Open(target))

    def push(self, layer_range: LayerRange, mark: Mark = PASSED) -> None:
        """Queues a layer range that is in this rank's cache once the device has passed `mark`.

        The transfer fails when too many ranges wait. Ranges of a transfer that is over are dropped.
        """
        transfer_id = layer_range.transfer_id
        written_by_s = self._written_by_s(mark)
        with self._changed:
            if transfer_id not in self._active or transfer_id in self._overflowed:
                return
            waiting = self._pushed_ranges - self._loop.transfers.removed_ranges
            if waiting < self._limits.waiting_ranges:
                self._pushed_ranges += 1
                self._post(Range(transfer_id, layer_range, mark, written_by_s))
            else:
                self._overflowed.add(transfer_id)
                detail = "too many layer ranges wait to be sent"
                self._post(Stop(transfer_id, QueueFull.reason, detail))

    def push_hidden_state(
        self, transfer_id: str, read: Callable[[], bytes], mark: Mark = PASSED
    ) -> None:
        """Queues the hidden state of the last token, before `finish`, for a target that asks for it.

        Calls `read` once the device has passed `mark`: at once, or on the sender's thread.
        """
        if mark is PASSED:
            state = read()
            read = lambda: state  # noqa: E731
        self.post(HiddenState(transfer_id, read, mark, self._written_by_s(mark)))

    def finish(self, transfer_id: str) -> None:
        """The engine pushes no more. The transfer fails if layers are still missing."""
        self.post(Finish(transfer_id))

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        """Ends a transfer. `on_quiet` follows unless it has been called."""
        self.post(Stop(transfer_id, reason, detail))

    def active_transfers(self) -> frozenset[str]:
        """The transfers that were opened and are not quiet yet: their source blocks may still be read."""
        with self._changed:
            return frozenset(self._active)

    def close(self) -> None:
        """Ends every transfer, then the streams and the sender's own thread. `closed` is done when all have ended.

        The event loop of the streams must run until then.
        """
        with self._changed:
            if not self.closing:
                self.closing = True
                self._post(Close())

    @property
    def has_records(self) -> bool:
        """Whether records wait to be taken."""
        return bool(self._records)

    def post(self, record: Record) -> None:
        """Queues a record."""
        with self._changed:
            self._post(record)

    def take_records(self) -> list[Record]:
        """Removes and returns every waiting record."""
        with self._changed:
            records = list(self._records)
            self._records.clear()
            return records

    def transfer_quiet(self, transfer_id: str) -> None:
        """The transfer is quiet. Its id may be used again."""
        with self._changed:
            self._active.discard(transfer_id)
            self._overflowed.discard(transfer_id)

    def _post(self, record: Record) -> None:
        self._records.append(record)
        self._changed.notify()

    def _written_by_s(self, mark: Mark) -> float:
        return 0.0 if mark is PASSED else self._clock.monotonic_s() + self._limits.write_timeout_s
