"""Plans, starts and acknowledges the writes of one prefill rank. Used by the sender's thread only."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future

from headrace_common.errors import TransferFailed
from headrace_kv.send import proto
from headrace_kv.send.context import SenderContext
from headrace_kv.send.layer_write import LayerWrite
from headrace_kv.send.mailbox import SenderInbox
from headrace_kv.send.peer import SenderPeer
from headrace_kv.send.transfer import OutgoingTransfer
from headrace_kv.send.transfer_table import OutgoingTransfers
from headrace_kv.transport.base import KvTransport, WriteResult

Step = tuple[OutgoingTransfer, LayerWrite | None]
"""The next batch of the write is to be started; without a write, the transfer's next range is to be planned."""


class _PeerQueue:
    """The waiting transfers and writes of one decode worker.

    `_ready` holds transfers with ranges to plan, each once; `_backlog` the writes of the range that was planned last.
    """

    def __init__(self) -> None:
        self._ready: OrderedDict[OutgoingTransfer, None] = OrderedDict()
        self._backlog: deque[Step] = deque()

    def add_transfer(self, transfer: OutgoingTransfer) -> None:
        """The transfer has ranges to plan. It keeps its place when it waits already."""
        self._ready[transfer] = None

    def add_write(self, transfer: OutgoingTransfer, write: LayerWrite) -> None:
        """A write of the range that was planned last is to be started."""
        self._backlog.append((transfer, write))

    def next_step(self) -> Step | None:
        """The first write with a batch left, else the next transfer with a range, which leaves the queue.

        Drops stopped transfers and writes without a batch left.
        """
        while self._backlog:
            transfer, write = step = self._backlog[0]
            if not transfer.stopped and write is not None and write.next_batch is not None:
                return step
            self._backlog.popleft()
        while self._ready:
            transfer, _ = self._ready.popitem(last=False)
            if not transfer.stopped and transfer.has_ranges:
                return transfer, None
        return None


class RoundRobinQueue:
    """The decode workers with waiting writes, in turn. A worker without room in its window delays no other."""

    def __init__(self, has_room: Callable[[str, int], bool]) -> None:
        self._has_room = has_room
        self._queues: dict[SenderPeer, _PeerQueue] = {}
        self._turns: OrderedDict[_PeerQueue, None] = OrderedDict()
        self._stalled = False

    @property
    def idle(self) -> bool:
        """Whether the last `next_step` found nothing to do, and nothing was added since."""
        return self._stalled or not self._turns

    def add_transfer(self, transfer: OutgoingTransfer) -> None:
        """The transfer has ranges to plan."""
        queue = self._queue_of(transfer.peer)
        queue.add_transfer(transfer)
        self._give_turn(queue)

    def add_write(self, transfer: OutgoingTransfer, write: LayerWrite) -> None:
        """A write of the range that was planned last is to be started."""
        self._queue_of(transfer.peer).add_write(transfer, write)

    def remove_peer(self, peer: SenderPeer) -> None:
        """The stream to a decode worker is lost."""
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self._turns.pop(queue, None)

    def next_step(self) -> Step | None:
        """What to do next; None when every worker waits for a batch to end."""
        for _ in range(len(self._turns)):
            queue, _ = self._turns.popitem(last=False)
            step = queue.next_step()
            if step is None:
                continue
            self._give_turn(queue)
            transfer, write = step
            if write is None:
                return step
            if self._has_room(write.session, write.next_bytes):
                transfer.peer.window_wait.end()
                return step
            transfer.peer.window_wait.start()
        self._stalled = bool(self._turns)
        return None

    def _queue_of(self, peer: SenderPeer) -> _PeerQueue:
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = _PeerQueue()
        return queue

    def _give_turn(self, queue: _PeerQueue) -> None:
        self._stalled = False
        self._turns[queue] = None


class WriteWindow:
    """Gives batches to the transport, and bounds how much is in flight to a session.

    A session has at most `pending_limit` batches in flight, and no more bytes than one write may have. Those bytes
    land well within a write lease.
    """

    def __init__(self, transport: KvTransport) -> None:
        self._transport = transport
        self._in_flight: dict[
            Future[WriteResult], tuple[OutgoingTransfer, LayerWrite, int, float]
        ] = {}
        self._sessions: dict[str, tuple[int, int]] = {}

    def has_room(self, session: str, payload_bytes: int) -> bool:
        """Whether a batch of `payload_bytes` may start."""
        count, nbytes = self._sessions.get(session, (0, 0))
        if not count:
            return True
        return (
            count < self._transport.pending_limit
            and nbytes + payload_bytes <= self._transport.byte_limit
        )

    def start(
        self, transfer: OutgoingTransfer, write: LayerWrite, now_s: float, timeout_s: float
    ) -> Future[WriteResult]:
        """Starts the write's next batch. Every failure is in the future. Call `end` when that is done."""
        nbytes = write.next_bytes
        batch = write.start_batch()
        count, before = self._sessions.get(write.session, (0, 0))
        self._sessions[write.session] = (count + 1, before + nbytes)
        transfer.batch_started()
        late_writes = transfer.peer.stream.late_writes
        late_writes.write_started()
        try:
            future = self._transport.submit(write.session, batch, timeout_s)
        except Exception as error:  # noqa: BLE001 - a result like any other
            future = Future()
            future.set_exception(error)
        # On the transport's thread: this one may be waiting in the transport for another peer.
        future.add_done_callback(lambda _: late_writes.write_ended())
        self._in_flight[future] = (transfer, write, nbytes, now_s + timeout_s)
        return future

    def end(self, future: Future[WriteResult]) -> tuple[OutgoingTransfer, LayerWrite]:
        """Frees the room of a batch that has ended; returns what it was a batch of."""
        transfer, write, nbytes, _ = self._in_flight.pop(future)
        transfer.batch_ended()
        count, before = self._sessions[write.session]
        if count == 1:
            del self._sessions[write.session]
        else:
            self._sessions[write.session] = (count - 1, before - nbytes)
        return transfer, write

    def overdue(self, now_s: float, grace_s: float) -> bool:
        """Whether batches are in flight, and all should have ended more than `grace_s` ago."""
        ends_s = max((end_s for *_, end_s in self._in_flight.values()), default=now_s)
        return now_s > ends_s + grace_s


class WriteScheduler:
    """Plans, writes and acknowledges the pushed ranges of all transfers. An error fails its transfer alone."""

    def __init__(
        self, context: SenderContext, inbox: SenderInbox, table: OutgoingTransfers
    ) -> None:
        self._clock = context.clock
        self._transport = context.transport
        self._inbox = inbox
        self._table = table
        self._window = WriteWindow(context.transport)
        self._queue = RoundRobinQueue(self._window.has_room)

    @property
    def idle(self) -> bool:
        """Whether `run_step` has nothing to do until a batch ends or a command is posted."""
        return self._queue.idle

    def overdue(self, grace_s: float) -> bool:
        """Whether batches are in flight, and all should have ended more than `grace_s` ago."""
        return self._window.overdue(self._clock.monotonic_s(), grace_s)

    def remove_peer(self, peer: SenderPeer) -> None:
        """The stream to a decode worker is lost. Its transfers are stopped."""
        self._queue.remove_peer(peer)

    def advance(self, transfer: OutgoingTransfer) -> None:
        """Sends a hidden state that is ready. Queues the transfer's ranges, commits it, or fails it as too short."""
        if not transfer.sending:
            return
        if transfer.hidden_state is not None:
            for message in transfer.hidden_state.take_messages():
                self._table.send(transfer, message)
        if transfer.complete:
            self._table.commit(transfer)
        elif transfer.has_ranges:
            self._queue.add_transfer(transfer)
        elif transfer.ended_short:
            detail = f"the engine ended without {transfer.missing()}"
            self._table.fail(transfer, TransferFailed(detail))

    def run_step(self) -> None:
        """Plans one range or starts one batch, if the transport has room for one."""
        step = self._queue.next_step()
        if step is None:
            return
        transfer, write = step
        try:
            if write is None:
                self._plan_range(transfer)
            else:
                self._start_batch(transfer, write)
        except Exception as error:  # noqa: BLE001 - fails this transfer alone
            self._table.fail(transfer, error)

    def _plan_range(self, transfer: OutgoingTransfer) -> None:
        layer_range, window_before_ns = transfer.next_range()
        self._inbox.ranges_removed(1)
        for edge, span in transfer.claim(layer_range):
            write = transfer.peer.plan_write(layer_range, edge, span)
            write.count_window_waits_from(window_before_ns)
            transfer.write_planned(write)
            self._queue.add_write(transfer, write)
        self._acknowledge(transfer)

    def _start_batch(self, transfer: OutgoingTransfer, write: LayerWrite) -> None:
        """Starts a write's next batch. Raises TransferFailed without a lease, TransferTimeout after the deadline."""
        now_s = self._clock.monotonic_s()
        stream = transfer.peer.stream
        lease_s = stream.lease.remaining_s(self._clock.lease_s())
        if lease_s <= 0.0:
            raise TransferFailed(f"the write lease from {stream.decode} is over")
        if now_s >= transfer.deadline_s:
            raise transfer.timeout_error()
        timeout_s = min(lease_s, transfer.deadline_s - now_s)
        if not write.submitted_ns:
            write.count_window_waits_to(transfer.peer.window_wait.total_ns())
        future = self._window.start(transfer, write, now_s, timeout_s)
        try:
            if write.next_batch is None:
                for observer in transfer.peer.observers:
                    observer.on_all_started(transfer.transfer_id, write, transfer.digest_seed)
        finally:
            if future.done():
                self._end_batch(future, time.monotonic_ns())
            else:
                future.add_done_callback(self._post_end)

    def _post_end(self, future: Future[WriteResult]) -> None:
        """Called by the transport, on any thread."""
        self._inbox.post(self._end_batch, future, time.monotonic_ns())

    def _end_batch(self, future: Future[WriteResult], end_ns: int) -> None:
        transfer, write = self._window.end(future)
        try:
            result = future.result()
        except Exception as error:  # noqa: BLE001 - fails this transfer alone
            quiet_s = self._clock.monotonic_s() + self._transport.quiet_after_failure_s
            transfer.batch_failed(quiet_s)
            self._table.fail(transfer, error)
        else:
            write.batch_landed(result, end_ns)
            if not transfer.stopped:
                try:
                    self._acknowledge(transfer)
                except Exception as error:  # noqa: BLE001 - fails this transfer alone
                    self._table.fail(transfer, error)
        if transfer.stopped:
            self._table.end_when_quiet(transfer)

    def _acknowledge(self, transfer: OutgoingTransfer) -> None:
        """Sends LayerDone for the writes that have landed, in the order in which they were planned."""
        peer = transfer.peer
        while (write := transfer.next_landed()) is not None:
            message = proto.layer_done(transfer.transfer_id, write)
            for observer in peer.observers:
                observer.on_acknowledge(write, message)
            transfer.control_bytes_counted(proto.enclosed_bytes(message))
            peer.stream.acknowledge(message)
        self.advance(transfer)
