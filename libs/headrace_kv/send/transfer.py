"""One outgoing transfer at a prefill rank, and the table of all. Used by the sender's thread only."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from enum import Enum

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import HeadraceError, InternalError, TransferTimeout
from headrace_common.latency.clocks import clocks_now
from headrace_common.telemetry.layer_stamps import NEVER, WORDS_PER_WRITE, WRITES_MAX, pack_writes
from headrace_kv.hidden_state import OutgoingHiddenState, hidden_state_rank
from headrace_kv.layout import KvLayout
from headrace_kv.messages import LayerRange, LinkSent, Reservation, SendReport, TransferTarget
from headrace_kv.send.stream import SenderContext
from headrace_kv.send.writes import LayerWrite, SenderPeer, WritePlan
from headrace_kv.tickets import digest_seed
from headrace_kv.transport.base import find_host
from headrace_kv.transport.memory import kind_of

_log = logging.getLogger(__name__)

_LAYERS_NAMED_MAX = 16
SWEEP_INTERVAL_S = 0.5
# Decode answers an Open at once. After this time the Open or its answer was lost, or the transfer has ended.
_ASK_AGAIN_S = 1.0
_NEVER_S = float("inf")
_WORD_MAX = NEVER - 1
_WORDS_MAX = 2 * WRITES_MAX * WORDS_PER_WRITE


class LinkRecord:
    """What a rank wrote to one decode rank for one transfer. Keeps the times of the last writes in one array.

    Add the writes in the order in which they were planned.
    """

    def __init__(self, first: LayerWrite) -> None:
        self._destination_rank = first.destination_rank
        self._session = first.session
        self._start_ns = first.ready_ns
        self._words = array("I")
        # Dictionaries keep the order in which the names were added.
        self._transports: dict[str, None] = {}
        self._strategies: dict[str, None] = {}
        self._payload_bytes = self._run_count = self._entry_count = self._write_count = 0
        self._submitted_ns = 0
        self._ready_ns = self._landed_ns = self._end_ns = self._start_ns
        self._moving_ns = 0

    def add_landed(self, write: LayerWrite, reserved_ns: int, now_ns: int) -> None:
        """A write has landed and is acknowledged now. The transfer had its reservation at `reserved_ns`."""
        self._payload_bytes += write.payload_bytes
        self._run_count += len(write.runs)
        self._entry_count += write.entry_count
        for result in write.results:
            self._transports[result.transport] = None
            self._strategies[result.strategy] = None
        landed_ns = write.landed_ns or now_ns
        submitted_ns = write.submitted_ns or landed_ns
        gathered_ns = submitted_ns
        staging_us = gather_us = 0
        if write.gather_ns or write.staging_wait_ns:
            gathered_ns = min(landed_ns, submitted_ns + write.staging_wait_ns + write.gather_ns)
            staging_ns = min(write.staging_wait_ns, gathered_ns - submitted_ns)
            staging_us = staging_ns // 1000
            gather_us = (gathered_ns - submitted_ns - staging_ns) // 1000
        idle_ns = max(gathered_ns, self._landed_ns)
        if landed_ns > idle_ns:
            self._moving_ns += landed_ns - idle_ns
        self._landed_ns = max(self._landed_ns, landed_ns)
        self._end_ns = max(self._end_ns, now_ns)
        move_us = (landed_ns - gathered_ns) // 1000
        times_us = (staging_us, gather_us, move_us, (now_ns - landed_ns) // 1000)
        self._add(write, reserved_ns, submitted_ns, times_us)

    def add_unfinished(self, write: LayerWrite, reserved_ns: int, now_ns: int) -> None:
        """The transfer ends now, and the write has not landed as a whole."""
        submitted_ns = write.submitted_ns or now_ns
        waited_us = max(0, now_ns - submitted_ns) // 1000
        self._add(write, reserved_ns, submitted_ns, (0, 0, NEVER, waited_us))
        self._end_ns = max(self._end_ns, now_ns)

    def report(self) -> LinkSent:
        """Describes the link."""
        now = clocks_now()
        start_unix_ns = now.unix_ns - (now.monotonic_ns - self._start_ns)
        return LinkSent(
            destination_rank=self._destination_rank,
            destination_host=find_host(self._session),
            transport="+".join(self._transports),
            strategy="+".join(self._strategies),
            payload_bytes=self._payload_bytes,
            run_count=self._run_count,
            entry_count=self._entry_count,
            write_count=self._write_count,
            start_unix_ns=start_unix_ns,
            submitted_unix_ns=start_unix_ns + self._submitted_ns - self._start_ns,
            ready_unix_ns=start_unix_ns + self._ready_ns - self._start_ns,
            landed_unix_ns=start_unix_ns + self._landed_ns - self._start_ns,
            end_unix_ns=start_unix_ns + self._end_ns - self._start_ns,
            moving_ns=self._moving_ns,
            layers=pack_writes(self._words),
        )

    def _add(
        self,
        write: LayerWrite,
        reserved_ns: int,
        submitted_ns: int,
        times_us: tuple[int, int, int, int],
    ) -> None:
        """`times_us` are the last four words."""
        ready_ns = write.ready_ns
        self._write_count += 1
        self._ready_ns = max(self._ready_ns, ready_ns)
        self._submitted_ns = self._submitted_ns or submitted_ns
        wait_ns = max(0, submitted_ns - ready_ns)
        lease_ns = window_ns = 0
        if reserved_ns > ready_ns:
            lease_ns = min(reserved_ns - ready_ns, wait_ns)
        if write.window_wait_ns:
            window_ns = min(write.window_wait_ns, wait_ns - lease_ns)
        words = self._words
        if len(words) >= _WORDS_MAX:
            del words[: _WORDS_MAX // 2]
        row = (
            write.layer,
            write.start_token,
            write.end_token,
            write.payload_bytes,
            (ready_ns - self._start_ns) // 1000,
            lease_ns // 1000,
            window_ns // 1000,
            wait_ns // 1000,
            *times_us,
        )
        try:
            words.extend(row)
        except OverflowError:
            # `extend` keeps the words before the one that is too large or negative.
            del words[len(words) - len(words) % WORDS_PER_WRITE :]
            words.extend([NEVER if word == NEVER else max(0, min(word, _WORD_MAX)) for word in row])


class Phase(Enum):
    """The phases of a transfer at one rank."""

    CONNECTING = "waits for the handshake with the decode worker"
    OPENING = "has sent Open, and waits for the reservation"
    SENDING = "plans and writes ranges as they come, until everything has landed"
    STOPPED = "starts no write any more, and waits for the batches in flight and the quiet time"


class Next(Enum):
    """What a transfer needs next."""

    EVENT = "something else must happen first"
    PLAN = "its next range can be planned"
    COMMIT = "everything that this rank must send has landed or, for a hidden state, is sent"
    FAIL = "the engine pushes no more, and nothing is left to plan or to land"


# A member is looked up here several times a write, which costs 0.2 us each on the class.
_CONNECTING, _OPENING, _SENDING, _STOPPED = Phase


class OutgoingTransfer:
    """The only owner of a transfer's state, and of its messages to decode. Others report events and ask `next_step`.

    The transfer is quiet when no batch is in flight and the quiet time after the last failed batch has passed.
    """

    def __init__(self, target: TransferTarget, peer: SenderPeer, context: SenderContext) -> None:
        self.target = target
        self.transfer_id = target.transfer_id
        self.peer = peer
        self.phase = _CONNECTING
        self.digest_seed = digest_seed(target.ticket)
        self._context = context
        self._hidden_state: OutgoingHiddenState | None = None
        if target.with_hidden_state and context.rank == hidden_state_rank(context.layout):
            self._hidden_state = OutgoingHiddenState(target.transfer_id, self.digest_seed)
        self._plan: WritePlan | None = None
        self.open_again_s = _NEVER_S
        """When to repeat Open, unless decode answers before."""
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
    def stopped(self) -> bool:
        """Whether no write may start any more."""
        return self.phase is _STOPPED

    @property
    def next_step(self) -> Next:
        """What it needs next."""
        if self.phase is not _SENDING or self._plan is None:
            return Next.EVENT
        if self._plan.complete and (self._hidden_state is None or self._hidden_state.sent):
            return Next.COMMIT
        if self._ranges:
            return Next.PLAN
        if self._push_finished and not self._unacknowledged:
            return Next.FAIL
        return Next.EVENT

    @property
    def quiet_at_s(self) -> float | None:
        """When the transfer is quiet, by the monotonic clock; None while batches are in flight."""
        return None if self._batches_in_flight else self._quiet_s

    def awaited(self) -> str:
        """What it waits for: an answer of decode, or what is not sent yet, e.g. "layers 3, 7, 8 (3 of 30)"."""
        if self._plan is None or self.phase is _CONNECTING:
            return f"the handshake with {self.target.decode}"
        if self.phase is _OPENING:
            return f"the reservation of {self.target.decode}"
        layers = self._plan.missing_layers()
        if not layers and self._hidden_state is not None and not self._hidden_state.sent:
            return "the hidden state"
        named = ", ".join(str(layer) for layer in layers[:_LAYERS_NAMED_MAX])
        more = ", ..." if len(layers) > _LAYERS_NAMED_MAX else ""
        return f"layers {named}{more} ({len(layers)} of {self._plan.layer_count})"

    def timeout_error(self) -> TransferTimeout:
        """The error of a deadline that has passed."""
        awaited = self.awaited()
        return TransferTimeout(
            f"the deadline of {self.transfer_id} passed while waiting for {awaited}",
            metadata={"transfer_id": self.transfer_id, "waited_for": awaited},
        )

    # Events of the stream.

    def plan_for(self, layout: KvLayout) -> bool:
        """Plans the writes for decode's layout. False when this rank has nothing to send.

        Raises LayoutMismatch when decode has no ranks to hold the heads.
        """
        context = self._context
        self._plan = WritePlan(self.transfer_id, context.rank, context.layout, layout)
        return self._plan.edge_count > 0 or self._hidden_state is not None

    def open(self, now_s: float) -> None:
        """Sends Open."""
        self.phase = _OPENING
        self._decode_waits = True
        opening = handoff_pb2.Open(transfer_id=self.transfer_id, ticket=self.target.ticket)
        self._send(handoff_pb2.HandoffRequest(open=opening))
        self.open_again_s = now_s + _ASK_AGAIN_S

    def reservation_received(self, reservation: Reservation, message_bytes: int) -> None:
        """Decode answered Open. Repeats are ignored. Raises ProtocolViolation when the blocks hold too little."""
        if self.phase is not _OPENING:
            return
        self.message_received(message_bytes)
        self._required_plan().reserve(reservation)
        self.phase, self.open_again_s = _SENDING, _NEVER_S
        self._reserved_ns = time.monotonic_ns()
        self._send_hidden_state()

    def message_received(self, message_bytes: int) -> None:
        """Decode has sent a message about the transfer."""
        self._control_bytes += message_bytes

    def stream_lost(self) -> None:
        """The stream has ended. Decode ends the transfer by itself."""
        self._decode_waits = False

    # Events of the engine.

    def range_pushed(self, layer_range: LayerRange) -> None:
        """The engine pushed a range."""
        self._ranges.append((layer_range, self.peer.window_wait_ns()))

    def hidden_state_pushed(self, state: bytes) -> None:
        """The engine pushed the hidden state. It is sent once there is a reservation."""
        if self._hidden_state is not None:
            self._hidden_state.supply(state)
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
            self.peer.stream.acknowledge(message)

    # The end.

    def commit(self) -> None:
        """Sends Commit. Decode waits for no further message."""
        commit = handoff_pb2.Commit(transfer_id=self.transfer_id, payload_bytes=self._payload_bytes)
        self._send(handoff_pb2.HandoffRequest(commit=commit))
        self._decode_waits = False

    def stop(self, reason: str, detail: str, *, notify_decode: bool) -> None:
        """Starts no more writes."""
        self.phase, self.open_again_s = _STOPPED, _NEVER_S
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
        if self.phase is _SENDING and self._hidden_state is not None:
            for message in self._hidden_state.take_messages():
                self._send(message)

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
    """Opens, fails and ends transfers. `on_end` gets the id of one that is quiet, and leaves the table (I2)."""

    def __init__(self, context: SenderContext, on_end: Callable[[str], None]) -> None:
        self.next_sweep_s = 0.0
        """When the next sweep is due, by the monotonic clock."""
        self.removed_ranges = 0
        self._context = context
        self._on_end = on_end
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
            sends = transfer.plan_for(layout)
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

    def sweep(self, now_s: float) -> None:
        """Ends stopped transfers after their quiet time, fails late ones, and repeats an unanswered Open."""
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

    def _sweep_at(self, time_s: float) -> None:
        self.next_sweep_s = min(self.next_sweep_s, time_s)
