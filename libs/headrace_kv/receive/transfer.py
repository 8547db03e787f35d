"""One transfer into a decode worker: its state, its writers and its outcome."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    HeadraceError,
    InternalError,
    ProtocolViolation,
    TransferTimeout,
)
from headrace_common.tickets import TicketKey
from headrace_kv.hidden_state import (
    HiddenFormat,
    IncomingHiddenState,
    hidden_state_rank,
)
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_kv.leases import Quarantine, QuarantinePolicy, TimerHandle, Timers
from headrace_kv.messages import Reservation, reservation_to_proto
from headrace_kv.receive.ledger import LayerLanded, Ledger
from headrace_kv.receive.observer import (
    ACTIVE_STATES,
    StateMachine,
    TransferObserver,
    TransferState,
)
from headrace_kv.tickets import digest_seed


@dataclass(frozen=True, eq=False, slots=True)
class PrefillPeer:
    """One prefill rank's stream. `send` queues a message; `end` ends the stream with an error.

    `hidden_format` is that of its worker's hidden states, None where it sends none.
    """

    ref: WorkerRef
    rank: int
    layout: KvLayout
    send: Callable[[handoff_pb2.HandoffResponse], None]
    end: Callable[[HeadraceError], None]
    hidden_format: HiddenFormat | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ref}"

    @property
    def sends_hidden_state(self) -> bool:
        """Whether this rank sends the hidden states of its worker's transfers."""
        return self.rank == hidden_state_rank(self.layout)

    def refuse(self, transfer_id: str, reason: str, detail: str, claim: str = "") -> None:
        """Sends a Cancel: the rank must stop writing for the transfer. `claim`: see Cancel.refused_claim."""
        cancel = handoff_pb2.Cancel(
            transfer_id=transfer_id, reason=reason, detail=detail, refused_claim=claim
        )
        self.send(handoff_pb2.HandoffResponse(cancel=cancel))


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """Figures of a complete transfer. `acknowledgement_count` leaves duplicates out.

    `payload_bytes` crossed the network; `local_bytes` were copied among decode ranks of one host.
    """

    acknowledgement_count: int
    payload_bytes: int
    local_bytes: int
    prefill: WorkerRef
    first_ack_unix_ns: int
    complete_unix_ns: int


class IncomingTransfer:
    """A reservation that is being filled. Runs on the receiver's event loop.

    Its methods report events; nothing else changes its state. `on_free` is called when its blocks may be reused.
    With a `hidden_format`, it is not complete without a hidden state.
    """

    def __init__(
        self,
        reservation: Reservation,
        layout: KvLayout,
        deadline: Deadline,
        on_free: Callable[[IncomingTransfer], None] | None = None,
        *,
        hidden_format: HiddenFormat | None = None,
        signer: TicketKey | None = None,
        sender: tuple[WorkerRef, bytes] | None = None,
    ) -> None:
        """`sender`: see Receiver.reserve."""
        self.signer = signer
        """See HandoffTickets."""
        self._reservation = reservation
        self._layout = layout
        self._deadline = deadline
        self._on_free = on_free
        self._ledger: Ledger | None = None
        self._prefill: WorkerRef | None
        self._prefill, self._ticket = sender or (None, b"")
        self._error: HeadraceError | None = None
        self._failed_s = 0.0
        self._timer: TimerHandle | None = None
        self._writers: set[PrefillPeer] = set()
        self._quarantines: list[Quarantine] = []
        self._observers: list[TransferObserver] = []
        self._hidden_state = IncomingHiddenState(reservation.transfer_id, hidden_format)
        self._states = StateMachine(reservation.transfer_id)
        self._ended = asyncio.Event()
        self._first_ack_unix_ns = 0

    @property
    def transfer_id(self) -> str:
        return self._reservation.transfer_id

    @property
    def reservation(self) -> Reservation:
        return self._reservation

    @property
    def deadline(self) -> Deadline:
        return self._deadline

    @property
    def ledger(self) -> Ledger | None:
        """The keys that have landed; None before the first Open."""
        return self._ledger

    @property
    def prefill(self) -> WorkerRef | None:
        """The worker that sends; None before its first Open."""
        return self._prefill

    @property
    def digest_seed(self) -> int:
        """The seed of its digests, from the ticket of the worker that sends."""
        return digest_seed(self._ticket)

    @property
    def error(self) -> HeadraceError | None:
        """Why it failed."""
        return self._error

    @property
    def failed_s(self) -> float:
        """When it failed, by the receiver's clock."""
        return self._failed_s

    @property
    def writers(self) -> frozenset[PrefillPeer]:
        """The ranks that may write."""
        return frozenset(self._writers)

    @property
    def quarantines(self) -> tuple[Quarantine, ...]:
        """Of writers that went away without a Quiesced."""
        return tuple(self._quarantines)

    @property
    def state(self) -> TransferState:
        return self._states.state

    @property
    def transitions(self) -> tuple[tuple[TransferState, int], ...]:
        """The states that it has been in, each with the time of entry in Unix nanoseconds."""
        return self._states.transitions

    @property
    def active(self) -> bool:
        """Whether it may still complete."""
        return self.state in ACTIVE_STATES

    @property
    def quiesced(self) -> bool:
        """Whether nothing writes into the blocks any more: no rank, no late write, no observer (I1)."""
        if self._writers or self._quarantines:
            return False
        return not any(observer.holds_blocks for observer in self._observers)

    @property
    def landed(self) -> bool:
        """Whether everything that prefill sends has landed. Observers may still have pending keys."""
        return self._ledger is not None and self._ledger.complete and self._hidden_state.complete

    @property
    def whole(self) -> bool:
        """Whether nothing is missing any more (I3)."""
        return self.landed and not any(observer.pending_keys for observer in self._observers)

    async def wait(self) -> TransferSummary:
        """Returns when the transfer is complete. Its own deadline bounds the wait.

        Raises TransferFailed, TransferTimeout naming the missing (rank, layer) keys, LayoutMismatch, or Cancelled.
        """
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._ledger is None or self._prefill is None:
            raise InternalError(f"transfer {self.transfer_id} ended without a sender")
        return TransferSummary(
            acknowledgement_count=self._ledger.ack_count,
            payload_bytes=self._ledger.payload_bytes,
            local_bytes=sum(observer.local_bytes for observer in self._observers),
            prefill=self._prefill,
            first_ack_unix_ns=self._first_ack_unix_ns,
            complete_unix_ns=self.entered_unix_ns(TransferState.COMPLETE),
        )

    async def hidden_state(self) -> bytes:
        """The last token's hidden state as soon as it is here, which may be before the KV. Raises as `wait`."""
        found = await self._hidden_state.wait()
        if found is None:
            detail = f"transfer {self.transfer_id} ended without a hidden state"
            raise self._error or InternalError(detail)
        return found

    def entered_unix_ns(self, state: TransferState) -> int:
        """When the transfer entered a state, 0 if it has not."""
        return self._states.entered_unix_ns(state)

    def add_observer(self, observer: TransferObserver) -> None:
        """Registers an optional feature's part. Call it before the first Open."""
        self._observers.append(observer)

    def start_timer(self, timers: Timers, on_timeout: Callable[[IncomingTransfer], None]) -> None:
        """Calls `on_timeout` at the deadline, unless the transfer ends before."""
        self._timer = timers.call_later(self._deadline.remaining_s(), on_timeout, self)

    def has_writer(self, peer: PrefillPeer) -> bool:
        """Whether a rank may write."""
        return peer in self._writers

    def has_accepted(self, prefill: WorkerRef, ticket: bytes) -> bool:
        """Whether a rank of this worker writes, or has written, or was to write, with this very ticket."""
        return self._prefill == prefill and hmac.compare_digest(self._ticket, ticket)

    def add_writer(self, peer: PrefillPeer, ticket: bytes) -> None:
        """Lets a rank with a valid ticket write.

        Raises ProtocolViolation when it has no part in the transfer, and LayoutMismatch for other hidden states.
        """
        if self._prefill is not None and self._prefill != peer.ref:
            raise ProtocolViolation(
                f"transfer {self.transfer_id} is being sent by {self._prefill}, not {peer.ref}"
            )
        if any(writer.rank == peer.rank for writer in self._writers):
            raise ProtocolViolation(f"{peer} has opened transfer {self.transfer_id} already")
        ledger = self._ledger
        if ledger is None:
            ledger = Ledger(self._layout, peer.layout, self._reservation)
        layers_due = peer.rank in ledger.source_ranks and not ledger.source_complete(peer.rank)
        if not layers_due and not self._owes_hidden_state(peer):
            raise ProtocolViolation(f"{peer} has nothing to send for {self.transfer_id}")
        if peer.sends_hidden_state:
            self._hidden_state.require_equal(peer.hidden_format)
        if self._prefill is None:
            self._prefill, self._ticket = peer.ref, ticket
        self._ledger = ledger
        self._writers.add(peer)
        if self.state is TransferState.RESERVED:
            self._states.enter(TransferState.OPEN)

    def remove_writer(self, peer: PrefillPeer) -> None:
        """A rank writes no more for the transfer."""
        self._writers.discard(peer)

    def quarantine_writer(self, peer: PrefillPeer, policy: QuarantinePolicy, now_s: float) -> None:
        """A rank's stream has ended: it stops writing within the policy's time."""
        self._writers.discard(peer)
        self.start_quarantine(policy, now_s)

    def start_quarantine(self, policy: QuarantinePolicy, now_s: float) -> None:
        """Something may write into the blocks within the policy's time."""
        self._quarantines.append(Quarantine(policy, now_s))

    def advance_quarantines(self, now_s: float) -> None:
        """Drops the quarantines that are over."""
        self._quarantines = [one for one in self._quarantines if not one.advance(now_s)]

    def reservation_message(self) -> handoff_pb2.HandoffResponse:
        """The message that states where an accepted rank may write."""
        reservation = reservation_to_proto(self._reservation)
        return handoff_pb2.HandoffResponse(reservation=reservation)

    def land(self, peer: PrefillPeer, layer: handoff_pb2.LayerDone) -> None:
        """Counts a range that has landed. Raises as Ledger.land and TransferObserver.on_layer_landed do."""
        if self._ledger is None:
            raise ProtocolViolation(f"{peer} has not opened {self.transfer_id}")
        key = (peer.rank, layer.destination_rank, layer.layer)
        new = self._ledger.land(key, layer.start_token, layer.end_token, layer.payload_bytes)
        if self.state is TransferState.OPEN:
            self._first_ack_unix_ns = time.time_ns()
            self._states.enter(TransferState.RECEIVING)
        if new and self._observers:
            landed = LayerLanded(
                edge=self._ledger.edge(key),
                layer=layer.layer,
                start_token=layer.start_token,
                end_token=layer.end_token,
                digest=layer.digest if layer.HasField("digest") else None,
            )
            for observer in self._observers:
                observer.on_layer_landed(landed)

    def land_hidden_state(self, peer: PrefillPeer, state: handoff_pb2.HiddenState) -> None:
        """Raises as IncomingHiddenState.receive, and ProtocolViolation for a rank that must not send it."""
        if not peer.sends_hidden_state:
            detail = f"{peer} is not the one to send the hidden state of {self.transfer_id}"
            raise ProtocolViolation(detail)
        self._hidden_state.receive(state, self.digest_seed)

    def require_committed(self, peer: PrefillPeer, payload_bytes: int) -> None:
        """Raises ProtocolViolation when a rank commits before everything of it has landed."""
        ledger = self._ledger
        if ledger is None or not ledger.source_complete(peer.rank) or self._owes_hidden_state(peer):
            raise ProtocolViolation(
                f"{peer} committed transfer {self.transfer_id} although {self.missing()} are missing"
            )
        landed_bytes = ledger.bytes_from(peer.rank)
        if payload_bytes != landed_bytes:
            raise ProtocolViolation(
                f"{peer} committed {payload_bytes} bytes of {self.transfer_id} but acknowledged {landed_bytes}"
            )

    def missing(self) -> str:
        """Names what is missing, for error messages."""
        if self._ledger is None:
            return "all layers, because no prefill rank opened it"
        parts = [self._ledger.missing(), *(observer.missing() for observer in self._observers)]
        if not self._hidden_state.complete:
            parts.append("the hidden state")
        return "; ".join(part for part in parts if part)

    def timeout_error(self) -> TransferTimeout:
        """The error of a transfer at its deadline."""
        missing = self.missing()
        return TransferTimeout(
            f"transfer {self.transfer_id} is not whole in time; missing are {missing}",
            metadata={"transfer_id": self.transfer_id, "missing": missing},
        )

    def complete(self) -> None:
        """Nothing is missing any more."""
        self._states.enter(TransferState.COMPLETE)
        self._end()

    def fail(self, error: HeadraceError, now_s: float) -> None:
        """It cannot complete. Its blocks are released once it has quiesced."""
        self._error = error
        self._failed_s = now_s
        for observer in self._observers:
            observer.on_failed()
        self._states.enter(TransferState.FAILED)
        self._end()
        self._states.enter(TransferState.DRAINING)

    def report_progress(self) -> None:
        """Calls every observer's `on_progress` of an active transfer, and raises what it raises."""
        if self.active:
            for observer in self._observers:
                observer.on_progress(self)

    def free(self) -> None:
        """Nothing writes into the blocks any more."""
        self._states.enter(TransferState.FREE)
        if self._on_free is not None:
            self._on_free(self)

    def _owes_hidden_state(self, peer: PrefillPeer) -> bool:
        return peer.sends_hidden_state and not self._hidden_state.complete

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._hidden_state.end()
        self._ended.set()
