"""One outgoing transfer at a prefill rank, and the table of all. Used by the sender's thread only."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import (
    HeadraceError,
    InternalError,
    TransferFailed,
    TransferTimeout,
)
from headrace_kv.hidden_state import hidden_state_message, hidden_state_rank
from headrace_kv.layout import KvLayout
from headrace_kv.messages import LayerRange, Reservation, SendReport, TransferTarget
from headrace_kv.send.plan import WritePlan
from headrace_kv.send.stream import SenderContext
from headrace_kv.send.writes import LayerWrite, LinkRecord, SenderPeer, WriteBatch, Writes
from headrace_kv.shard_map import Edges, edges_from
from headrace_kv.tickets import digest_seed
from headrace_kv.transport.base import find_host
from headrace_kv.transport.memory import kind_of

_log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5
# Decode answers an Open at once. After this time the Open or its answer was lost, or the transfer has ended.
_ASK_AGAIN_S = 1.0
_NEVER_S = float("inf")
# After so many writes, the other ranks of the thread get their turn.
_WRITES_PER_TURN = 64


Next: TypeAlias = Literal["event", "plan", "commit", "fail"]
"""What a transfer needs next.

"event": something else must happen first. "plan": its next range can be planned. "commit": everything that this rank
must send has landed or, for a hidden state, is sent. "fail": the engine pushes no more, and nothing is left to plan or
to land.
"""


class OutgoingTransfer:
    """The only owner of a transfer's state, and of its messages to decode. Others report events and ask `next_step`.

    The transfer is quiet when no batch is in flight and the quiet time after the last failed batch has passed.
    """

    def __init__(self, target: TransferTarget, peer: SenderPeer, context: SenderContext) -> None:
        self.target = target
        self.transfer_id = target.transfer_id
        self.peer = peer
        self.stopped = False
        """Whether no write starts any more. It waits for the batches in flight and the quiet time."""
        self.digest_seed = digest_seed(target.ticket)
        self._context = context
        self._hidden_state = b""
        self._hidden_state_due = target.with_hidden_state and context.rank == hidden_state_rank(
            context.layout
        )
        # From the handshake and the reservation on.
        self._edges: Edges = ()
        self._plan: WritePlan | None = None
        self.open_again_s = _NEVER_S
        """When to repeat Open, unless decode answers before."""
        self.opened_s = self.answer_due_s = _NEVER_S
        """When Open was sent first, and when decode must have answered it."""
        # From Open until Commit or the loss of the stream, decode waits for the end of the transfer.
        self._decode_waits = False
        # Each with the total of the peer's window waits at the time of the push.
        self._ranges: deque[tuple[LayerRange, int]] = deque()
        self._push_finished = False
        self._unacknowledged: deque[LayerWrite] = deque()
        self._batches_in_flight = 0
        self._quiet_s = 0.0
        self._reason = self._detail = ""
        self._links: dict[int, LinkRecord] = {}
        self._reserved_ns = 0
        self._payload_bytes = self._control_bytes = 0

    # Questions.

    @property
    def next_step(self) -> Next:
        """What it needs next."""
        if self.stopped or self._plan is None:
            return "event"
        if self._plan.complete and not self._hidden_state_due:
            return "commit"
        if self._ranges:
            return "plan"
        if self._push_finished and not self._unacknowledged:
            return "fail"
        return "event"

    @property
    def quiet_at_s(self) -> float | None:
        """When the transfer is quiet, by the monotonic clock; None while batches are in flight."""
        return None if self._batches_in_flight else self._quiet_s

    def awaited(self) -> str:
        """What it waits for: an answer of decode, or what is not sent yet."""
        if self._plan is not None:
            return self._plan.missing() or "the hidden state"
        answer = "reservation of" if self._decode_waits else "handshake with"
        return f"the {answer} {self.target.decode}"

    def timeout_error(self) -> TransferTimeout:
        """The error of a deadline that has passed."""
        awaited = self.awaited()
        return TransferTimeout(
            f"the deadline of {self.transfer_id} passed while waiting for {awaited}",
            metadata={"transfer_id": self.transfer_id, "waited_for": awaited},
        )

    # Events of the stream.

    def sends_to(self, layout: KvLayout) -> bool:
        """Whether this rank has anything to send to decode's layout.

        Raises LayoutMismatch when decode has no ranks to hold the heads.
        """
        rank, own = self._context.rank, self._context.layout
        self._edges = edges_from(rank, own, layout, self.transfer_id)
        return any(self._edges) or self._hidden_state_due

    def open(self, now_s: float) -> None:
        """Sends Open."""
        self._decode_waits = True
        opening = handoff_pb2.Open(transfer_id=self.transfer_id, ticket=self.target.ticket)
        self._send(handoff_pb2.HandoffRequest(open=opening))
        self.open_again_s = now_s + _ASK_AGAIN_S
        self.opened_s = min(self.opened_s, now_s)
        due_s = now_s + self.peer.answer_wait_s(self.transfer_id, now_s)
        self.answer_due_s = min(self.answer_due_s, due_s)

    def reservation_received(self, reservation: Reservation, message_bytes: int) -> None:
        """Decode answered Open. Repeats are ignored. Raises ProtocolViolation when the blocks hold too little."""
        layout = self.peer.layout
        if self.stopped or self._plan is not None or layout is None:
            return
        self.message_received(message_bytes)
        self._plan = WritePlan(self._edges, self._context.layout, layout, reservation)
        self.open_again_s = _NEVER_S
        self._reserved_ns = time.monotonic_ns()
        self._send_hidden_state()

    def message_received(self, message_bytes: int) -> None:
        """Decode has sent a message about the transfer. The first one answers its Open."""
        self._control_bytes += message_bytes
        if self.answer_due_s < _NEVER_S:
            self.answer_due_s = _NEVER_S
            self.peer.open_answered()

    def stream_lost(self) -> None:
        """The stream has ended. Decode ends the transfer by itself."""
        self._decode_waits = False

    # Events of the engine.

    def range_pushed(self, layer_range: LayerRange) -> None:
        """The engine pushed a range."""
        self._ranges.append((layer_range, self.peer.window_wait_ns()))

    def hidden_state_pushed(self, state: bytes) -> None:
        """The engine pushed the hidden state. It is sent once there is a reservation."""
        self._hidden_state = state
        self._send_hidden_state()

    def push_finished(self) -> None:
        """The engine pushes no more."""
        self._push_finished = True

    # Events of the writes.

    def plan_range(self) -> list[LayerWrite]:
        """Plans the writes of the oldest pushed range. Raises what WritePlan.claim and SenderPeer.plan_write raise."""
        layer_range, window_before_ns = self._ranges.popleft()
        writes = []
        for edge, span in self._required_plan().claim(layer_range):
            write = self.peer.plan_write(layer_range, edge, span, window_before_ns)
            self._unacknowledged.append(write)
            writes.append(write)
        return writes

    def batch_started(self) -> None:
        """The transport has a batch of one of the writes."""
        self._batches_in_flight += 1

    def batch_ended(self, quiet_s: float = 0.0) -> None:
        """The transport has ended a batch. Bytes of a failed one may land until `quiet_s` of the monotonic clock."""
        self._batches_in_flight -= 1
        self._quiet_s = max(self._quiet_s, quiet_s)

    def acknowledge(self) -> None:
        """Sends LayerDone for the writes that have landed, in the order in which they were planned."""
        while self._unacknowledged and self._unacknowledged[0].landed:
            write = self._unacknowledged.popleft()
            self._required_plan().landed(write.layer, write.destination_rank, write.end_token)
            self._payload_bytes += write.payload_bytes
            self._link_of(write).add_landed(write, self._reserved_ns, time.monotonic_ns())
            message = write.layer_done()
            # Bytes that it adds to the message that carries it.
            nbytes = message.ByteSize()
            self._control_bytes += nbytes + (2 if nbytes < 128 else 3)
            self.peer.stream.send(message)

    # The end.

    def commit(self) -> None:
        """Sends Commit. Decode waits for no further message."""
        commit = handoff_pb2.Commit(transfer_id=self.transfer_id, payload_bytes=self._payload_bytes)
        self._send(handoff_pb2.HandoffRequest(commit=commit))
        self._decode_waits = False

    def stop(self, reason: str, detail: str, *, notify_decode: bool) -> None:
        """Starts no more writes."""
        self.stopped, self.open_again_s = True, _NEVER_S
        self._reason, self._detail = reason, detail
        now_ns = time.monotonic_ns()
        for write in self._unacknowledged:
            write.abandon()
            self._link_of(write).add_unfinished(write, self._reserved_ns, now_ns)
        self._unacknowledged.clear()
        if notify_decode and self._decode_waits:
            failed = handoff_pb2.Failed(transfer_id=self.transfer_id, reason=reason, detail=detail)
            self._send(handoff_pb2.HandoffRequest(failed=failed))

    def drop_ranges(self) -> int:
        """Drops the ranges that wait to be planned; returns how many there were."""
        count = len(self._ranges)
        self._ranges.clear()
        return count

    def end(self) -> SendReport:
        """Sends Quiesced if decode waits for it. Returns what the rank did."""
        if self._decode_waits:
            quiesced = handoff_pb2.Quiesced(transfer_id=self.transfer_id)
            self._send(handoff_pb2.HandoffRequest(quiesced=quiesced))
        return SendReport(
            self.transfer_id,
            self._context.rank,
            self._reason,
            self._detail,
            tuple(link.report() for link in self._links.values()),
            self._control_bytes,
            find_host(self._context.memory.session),
            kind_of(self._context.transport.memory),
        )

    def _send(self, request: handoff_pb2.HandoffRequest) -> None:
        self._control_bytes += request.ByteSize()
        self.peer.stream.send(request)

    def _send_hidden_state(self) -> None:
        if self._plan is not None and self._hidden_state and self._hidden_state_due:
            self._send(hidden_state_message(self.transfer_id, self._hidden_state, self.digest_seed))
            self._hidden_state, self._hidden_state_due = b"", False

    def _link_of(self, write: LayerWrite) -> LinkRecord:
        link = self._links.get(write.destination_rank)
        if link is None:
            link = self._links[write.destination_rank] = LinkRecord(write)
        return link

    def _required_plan(self) -> WritePlan:
        if self._plan is None:
            raise InternalError(f"{self.transfer_id} has no plan yet")
        return self._plan


class OutgoingTransfers:
    """Opens, advances, fails and ends transfers, and starts their writes.

    `on_end` gets the id of a transfer that is quiet, and leaves the table (I2). `on_landed` gets a batch that the
    transport has ended, on any thread: call `land` for it.
    """

    def __init__(
        self,
        context: SenderContext,
        on_end: Callable[[str], None],
        on_landed: Callable[[WriteBatch], None],
    ) -> None:
        self.next_sweep_s = 0.0
        """When the next sweep is due, by the monotonic clock."""
        self.removed_ranges = 0
        self._context = context
        self._on_end = on_end
        self._on_landed = on_landed
        self.writes = Writes(context, self._plan)
        self._transfers: dict[str, OutgoingTransfer] = {}

    def find(self, transfer_id: str) -> OutgoingTransfer | None:
        """A transfer that is not quiet yet."""
        return self._transfers.get(transfer_id)

    def find_running(self, transfer_id: str) -> OutgoingTransfer | None:
        """A transfer that is not stopped."""
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None or transfer.stopped else transfer

    def all(self, peer: SenderPeer | None = None) -> list[OutgoingTransfer]:
        """The transfers, of one decode worker or of all, that are not quiet yet."""
        every = self._transfers.values()
        return [transfer for transfer in every if peer is None or transfer.peer is peer]

    def add(self, target: TransferTarget, peer: SenderPeer) -> None:
        """Adds a transfer, and opens it at decode once the peer's stream is ready."""
        transfer = OutgoingTransfer(target, peer, self._context)
        self._transfers[transfer.transfer_id] = transfer
        self._sweep_at(target.deadline_s)
        if peer.layout is not None:
            self.open(transfer, peer.layout)

    def open(self, transfer: OutgoingTransfer, layout: KvLayout) -> None:
        """Opens a transfer at decode, unless this rank has nothing to send to its `layout`."""
        try:
            sends = transfer.sends_to(layout)
        except HeadraceError as error:
            self.fail(transfer, error)
            return
        if sends:
            transfer.open(self._context.clock.monotonic_s())
            self._sweep_at(transfer.open_again_s)
        else:
            self.end(transfer)

    def ranges_removed(self, count: int) -> None:
        """Ranges were planned or dropped, and wait no more."""
        self.removed_ranges += count

    def fail(self, transfer: OutgoingTransfer, error: Exception) -> None:
        """Stops a transfer. An error outside the error tree is logged and reported as a bug."""
        if not isinstance(error, HeadraceError):
            rank, name = self._context.rank, transfer.transfer_id
            _log.error("rank %d: sending %s met a bug", rank, name, exc_info=error)
            error = InternalError(f"sending met a bug: {error}")
        self.stop(transfer, error.reason, error.detail)

    def stop(
        self, transfer: OutgoingTransfer, reason: str, detail: str, *, notify_decode: bool = True
    ) -> None:
        """Starts no more writes for a transfer. It ends when those in flight can land no more. The first one counts."""
        if transfer.stopped:
            return
        transfer.stop(reason, detail, notify_decode=notify_decode)
        self.ranges_removed(transfer.drop_ranges())
        self.end_when_quiet(transfer)

    def end_when_quiet(self, transfer: OutgoingTransfer) -> None:
        """Ends a stopped transfer if it is quiet."""
        quiet_s = transfer.quiet_at_s
        if quiet_s is None or not transfer.stopped:
            return
        if self._context.clock.monotonic_s() >= quiet_s:
            self.end(transfer)
        else:
            self._sweep_at(quiet_s)

    def sweep(self) -> None:
        """When it is due, ends stopped transfers after their quiet time, fails late ones, and repeats Opens."""
        now_s = self._context.clock.monotonic_s()
        if now_s < self.next_sweep_s:
            return
        self.next_sweep_s = now_s + SWEEP_INTERVAL_S
        for transfer in self.all():
            try:
                self._check_times(transfer, now_s)
            except Exception:  # noqa: BLE001 - a bug in one transfer must not delay the others
                rank, name = self._context.rank, transfer.transfer_id
                _log.exception("rank %d: the times of %s met a bug", rank, name)

    def _check_times(self, transfer: OutgoingTransfer, now_s: float) -> None:
        if transfer.stopped:
            self.end_when_quiet(transfer)
        elif now_s >= transfer.target.deadline_s:
            self.fail(transfer, transfer.timeout_error())
        elif now_s >= transfer.answer_due_s:
            awaited, wait_s = transfer.awaited(), transfer.answer_due_s - transfer.opened_s
            waited = f"{awaited} did not come within {wait_s:g} s of Open"
            self.fail(transfer, TransferTimeout(waited, metadata={"waited_for": awaited}))
            transfer.peer.open_silent(now_s)
        else:
            if now_s >= transfer.open_again_s:
                transfer.open(now_s)
            self._sweep_at(min(transfer.target.deadline_s, transfer.open_again_s))

    def end(self, transfer: OutgoingTransfer) -> None:
        """Removes a quiet transfer, and reports it to the engine. The source blocks are free from then on."""
        if self._transfers.pop(transfer.transfer_id, None) is None:
            return
        report = transfer.end()
        self.ranges_removed(transfer.drop_ranges())
        self._on_end(transfer.transfer_id)
        try:
            self._context.on_quiet(report)
        except Exception:  # noqa: BLE001 - the thread survives it
            rank, name = self._context.rank, transfer.transfer_id
            _log.exception("rank %d: on_quiet raised for %s", rank, name)

    # Writes.

    def advance(self, transfer: OutgoingTransfer) -> None:
        """Acknowledges what has landed, and does what the transfer needs next."""
        transfer.acknowledge()
        match transfer.next_step:
            case "plan":
                self.writes.add(transfer.peer, transfer.transfer_id)
            case "commit":
                transfer.commit()
                self.end(transfer)
            case "fail":
                detail = f"the engine ended without {transfer.awaited()}"
                self.fail(transfer, TransferFailed(detail))

    def start_writes(self, interrupted: Callable[[], bool]) -> bool:
        """Starts the writes that have room, until a record comes, which may stop what would be written.

        Whether there may be more to start.
        """
        for _ in range(_WRITES_PER_TURN):
            write = self.writes.next_write()
            transfer = self.find_running(write.transfer_id) if write is not None else None
            if write is None or transfer is None:
                return False
            try:
                self._start(transfer, write)
            except Exception as error:  # noqa: BLE001 - fails this transfer alone
                self.fail(transfer, error)
            if interrupted():
                break
        return True

    def land(self, batch: WriteBatch, end_ns: int) -> None:
        """A batch has ended, at `end_ns` of time.monotonic_ns."""
        self.writes.end(batch)
        # It is in the table while batches are in flight.
        transfer = self._transfers[batch.write.transfer_id]
        try:
            result = batch.future.result()
        except Exception as error:  # noqa: BLE001 - fails this transfer alone
            now_s = self._context.clock.monotonic_s()
            transfer.batch_ended(now_s + self._context.transport.quiet_after_failure_s)
            self.fail(transfer, error)
        else:
            batch.write.batch_landed(result, end_ns)
            transfer.batch_ended()
            try:
                self.advance(transfer)
            except Exception as error:  # noqa: BLE001 - fails this transfer alone
                self.fail(transfer, error)
        self.end_when_quiet(transfer)

    def _plan(self, transfer_id: str) -> list[LayerWrite]:
        """The writes of a transfer's next range; none when it has failed."""
        transfer = self.find(transfer_id)
        if transfer is None or transfer.next_step != "plan":
            return []
        self.ranges_removed(1)
        try:
            writes = transfer.plan_range()
            self.advance(transfer)
        except Exception as error:  # noqa: BLE001 - fails this transfer alone
            self.fail(transfer, error)
            return []
        return writes

    def _start(self, transfer: OutgoingTransfer, write: LayerWrite) -> None:
        """Starts a write's next batch. Raises TransferFailed without a lease, TransferTimeout after the deadline."""
        left_s = transfer.target.deadline_s - self._context.clock.monotonic_s()
        if left_s <= 0.0:
            raise transfer.timeout_error()
        batch = self.writes.start(write, transfer.peer, left_s)
        transfer.batch_started()
        try:
            if write.next_batch is None:
                memory, terms = self._context.transport.memory, transfer.peer.digests
                write.digest_source(memory, terms, transfer.digest_seed)
        finally:
            if batch.future.done():
                self.land(batch, time.monotonic_ns())
            else:
                batch.future.add_done_callback(lambda _: self._on_landed(batch))

    def _sweep_at(self, time_s: float) -> None:
        self.next_sweep_s = min(self.next_sweep_s, time_s)
