"""Plans, starts and acknowledges the writes of one prefill rank. Used by the sender's thread only."""

from __future__ import annotations

import time
from concurrent.futures import Future

from headrace_common.errors import TransferFailed
from headrace_kv.send import proto
from headrace_kv.send.context import SenderContext
from headrace_kv.send.mailbox import SenderInbox
from headrace_kv.send.peer import SenderPeer
from headrace_kv.send.transfer import OutgoingTransfer
from headrace_kv.send.transfer_table import TransferTable
from headrace_kv.send.write_queue import RoundRobinQueue, WriteWindow
from headrace_kv.send.writes.layer_write import LayerWrite
from headrace_kv.transport.base import WriteResult


class WriteScheduler:
    """Plans, writes and acknowledges the pushed ranges of all transfers. An error fails its transfer alone."""

    def __init__(self, context: SenderContext, inbox: SenderInbox, table: TransferTable) -> None:
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
        """Sends logits that are ready, then queues the transfer's ranges, commits it, or fails it as too short."""
        if not transfer.sending:
            return
        if transfer.logits is not None:
            for part in transfer.logits.take_parts():
                self._table.send(transfer, part)
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
