"""The transfers of one prefill rank, from their opening until they are quiet. Used by the sender's thread only."""

from __future__ import annotations

import logging

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import HeadraceError, InternalError
from headrace_kv.messages import TransferTarget
from headrace_kv.send import proto
from headrace_kv.send.context import SenderContext
from headrace_kv.send.layer_write import WritePlan
from headrace_kv.send.mailbox import SenderInbox
from headrace_kv.send.peer import SenderPeer
from headrace_kv.send.transfer import OutgoingTransfer
from headrace_kv.transport.base import find_host
from headrace_kv.transport.memory import kind_of

_log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5
# Decode answers an Open at once. After this time the Open or its answer was lost, or the transfer has ended.
_ASK_AGAIN_S = 1.0


class OutgoingTransfers:
    """Opens, commits, fails and ends transfers: sends the messages for that to decode, and the report to the engine.

    A transfer ends, and leaves the table, when it is quiet (I2).
    """

    def __init__(self, context: SenderContext, inbox: SenderInbox) -> None:
        self._context = context
        self._inbox = inbox
        self._transfers: dict[str, OutgoingTransfer] = {}
        self._next_sweep_s = 0.0

    @property
    def empty(self) -> bool:
        """Whether every transfer is quiet."""
        return not self._transfers

    @property
    def next_sweep_s(self) -> float:
        """When the next sweep is due, by the monotonic clock."""
        return self._next_sweep_s

    def find(self, transfer_id: str) -> OutgoingTransfer | None:
        """A transfer that is not quiet yet."""
        return self._transfers.get(transfer_id)

    def find_running(self, transfer_id: str) -> OutgoingTransfer | None:
        """A transfer that is not stopped."""
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None or transfer.stopped else transfer

    def all(self) -> list[OutgoingTransfer]:
        """Every transfer that is not quiet yet."""
        return list(self._transfers.values())

    def of_peer(self, peer: SenderPeer) -> list[OutgoingTransfer]:
        """The transfers to a decode worker."""
        return [transfer for transfer in self._transfers.values() if transfer.peer is peer]

    def add(self, target: TransferTarget, peer: SenderPeer) -> OutgoingTransfer:
        """Adds a transfer that is not opened at decode yet."""
        transfer = OutgoingTransfer(target, peer, self._context.rank, target.deadline_s)
        self._transfers[transfer.transfer_id] = transfer
        self._sweep_at(target.deadline_s)
        return transfer

    def open(self, transfer: OutgoingTransfer) -> None:
        """Opens a transfer at decode, unless this rank has nothing to send. The peer's stream must be ready."""
        layout = transfer.peer.layout
        if layout is None:
            raise InternalError(f"the stream to {transfer.target.decode} is not ready")
        context = self._context
        try:
            plan = WritePlan(transfer.transfer_id, context.rank, context.layout, layout)
        except HeadraceError as error:
            self.fail(transfer, error)
            return
        transfer.planned(plan)
        if transfer.nothing_to_send:
            self._end(transfer)
        else:
            self._send_open(transfer)

    def _send_open(self, transfer: OutgoingTransfer) -> None:
        ask_again_s = self._context.clock.monotonic_s() + _ASK_AGAIN_S
        transfer.open_sent(ask_again_s)
        self._sweep_at(ask_again_s)
        self.send(transfer, proto.opening(transfer.transfer_id, transfer.target.ticket))

    def send(self, transfer: OutgoingTransfer, request: handoff_pb2.HandoffRequest) -> None:
        """Sends a message about a transfer."""
        transfer.control_bytes_counted(request.ByteSize())
        transfer.peer.stream.send(request)

    def commit(self, transfer: OutgoingTransfer) -> None:
        """Everything has landed."""
        self.send(transfer, proto.commit(transfer.transfer_id, transfer.payload_bytes))
        transfer.commit_sent()
        self._end(transfer)

    def fail(self, transfer: OutgoingTransfer, error: Exception) -> None:
        """Stops a transfer. An error outside the error tree is logged and reported as a bug."""
        if not isinstance(error, HeadraceError):
            rank, name = self._context.rank, transfer.transfer_id
            _log.error("rank %d: sending %s met a bug", rank, name, exc_info=error)
            error = InternalError(f"sending met a bug: {error}")
        self.stop(transfer, error.reason, error.detail, notify_decode=True)

    def stop(
        self, transfer: OutgoingTransfer, reason: str, detail: str, *, notify_decode: bool
    ) -> None:
        """Starts no more writes for a transfer. It ends when those in flight can land no more."""
        if transfer.stopped:
            return
        transfer.stop(reason, detail)
        self._drop_ranges(transfer)
        if notify_decode and transfer.decode_waits:
            self.send(transfer, proto.failed(transfer.transfer_id, reason, detail))
        self.end_when_quiet(transfer)

    def end_when_quiet(self, transfer: OutgoingTransfer) -> None:
        """Ends a stopped transfer if it is quiet."""
        quiet_s = transfer.quiet_at_s()
        if quiet_s is None:
            return
        if self._context.clock.monotonic_s() >= quiet_s:
            self._end(transfer)
        else:
            self._sweep_at(quiet_s)

    def start_sweep(self, now_s: float) -> list[OutgoingTransfer]:
        """The transfers to call `check_times` for."""
        self._next_sweep_s = now_s + SWEEP_INTERVAL_S
        return self.all()

    def check_times(self, transfer: OutgoingTransfer, now_s: float) -> None:
        """Ends a stopped transfer after its quiet time, fails a late one, or repeats an unanswered Open."""
        if transfer.stopped:
            self.end_when_quiet(transfer)
        elif now_s >= transfer.deadline_s:
            self.fail(transfer, transfer.timeout_error())
        elif transfer.must_ask_again(now_s):
            self._send_open(transfer)
        else:
            self._sweep_at(transfer.deadline_s)

    def _end(self, transfer: OutgoingTransfer) -> None:
        """Sends Quiesced if decode waits for it, and reports to the engine. The source blocks are free from then on."""
        if self._transfers.pop(transfer.transfer_id, None) is None:
            return
        if transfer.decode_waits:
            self.send(transfer, proto.quiesced(transfer.transfer_id))
        self._drop_ranges(transfer)
        self._inbox.transfer_quiet(transfer.transfer_id)
        try:
            context = self._context
            host = find_host(context.memory.session)
            context.on_quiet(transfer.report(host, kind_of(context.transport.memory)))
        except Exception:  # noqa: BLE001 - the thread survives it
            rank, name = self._context.rank, transfer.transfer_id
            _log.exception("rank %d: on_quiet raised for %s", rank, name)

    def _drop_ranges(self, transfer: OutgoingTransfer) -> None:
        self._inbox.ranges_removed(transfer.drop_ranges())

    def _sweep_at(self, time_s: float) -> None:
        self._next_sweep_s = min(self._next_sweep_s, time_s)
