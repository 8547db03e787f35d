"""One transfer into a decode worker: its state, its writers and its outcome."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, InternalError, ProtocolViolation
from headrace_common.tickets import TicketKey
from headrace_kv.hidden_state import (
    HiddenFormat,
    IncomingHiddenState,
    hidden_state_rank,
)
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_kv.leases import Quarantine, QuarantinePolicy, TimerHandle, Timers
from headrace_kv.messages import Reservation
from headrace_kv.receive.ledger import LayerLanded, Ledger
from headrace_kv.receive.local_broadcast import LocalCopies
from headrace_kv.receive.verification import RangeChecks
from headrace_kv.tickets import digest_seed

_log = logging.getLogger(__name__)


class TransferState(Enum):
    """A transfer's blocks belong to it until FREE."""

    RESERVED = "reserved"
    OPEN = "open"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    FAILED = "failed"
    DRAINING = "draining"
    FREE = "free"


_S = TransferState
NEXT_STATES: Final[dict[TransferState, frozenset[TransferState]]] = {
    _S.RESERVED: frozenset({_S.OPEN, _S.FAILED}),
    _S.OPEN: frozenset({_S.RECEIVING, _S.FAILED}),
    _S.RECEIVING: frozenset({_S.COMPLETE, _S.FAILED}),
    _S.COMPLETE: frozenset({_S.FREE}),
    _S.FAILED: frozenset({_S.DRAINING}),
    _S.DRAINING: frozenset({_S.FREE}),
    _S.FREE: frozenset(),
}
# A set would call the enumeration's hash for each look.
ACTIVE_STATES: Final = (_S.RESERVED, _S.OPEN, _S.RECEIVING)


class StateMachine:
    """One transfer's states. `transitions` holds each with the Unix time of its entry in nanoseconds."""

    def __init__(self, transfer_id: str, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._transfer_id = transfer_id
        self._unix_ns = unix_ns
        self.state = TransferState.RESERVED
        self._transitions = [(self.state, unix_ns())]

    @property
    def transitions(self) -> tuple[tuple[TransferState, int], ...]:
        return tuple(self._transitions)

    def enter(self, state: TransferState) -> None:
        """Raises InternalError, and changes nothing, when `state` does not follow."""
        if state not in NEXT_STATES[self.state]:
            raise InternalError(
                f"transfer {self._transfer_id} cannot go from {self.state.value} to {state.value}",
                metadata={
                    "transfer_id": self._transfer_id,
                    "from": self.state.value,
                    "to": state.value,
                },
            )
        _log.debug("transfer %s: %s -> %s", self._transfer_id, self.state, state)
        self.state = state
        self._transitions.append((state, self._unix_ns()))


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


OnLayers: TypeAlias = Callable[[int], None]
OnEnd: TypeAlias = Callable[[TransferSummary | HeadraceError], object]


class IncomingTransfer:
    """A reservation that is being filled. Runs on the receiver's event loop.

    Its methods report events; nothing else changes its attributes. `on_free` is called when its blocks may be reused.
    With a `hidden_format`, it is not complete without a hidden state. `copies` and `checks` are those of `start`.
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
        self.transfer_id = reservation.transfer_id
        self.reservation = reservation
        self.deadline = deadline
        self.ledger: Ledger | None = None
        """The keys that have landed; None before the first Open."""
        self.prefill: WorkerRef | None
        """The worker that sends; None before its first Open."""
        self.prefill, self._ticket = sender or (None, b"")
        self._digest_seed = digest_seed(self._ticket)
        self.copies: LocalCopies | None = None
        self.checks: RangeChecks | None = None
        self.error: HeadraceError | None = None
        """Why it failed."""
        self.failed_s = 0.0
        """When it failed, by the receiver's clock."""
        self.writers: set[PrefillPeer] = set()
        """The ranks that may write."""
        self.quarantines: list[Quarantine] = []
        """Of writers that went away without a Quiesced."""
        self.states = StateMachine(reservation.transfer_id)
        self._on_layers: OnLayers | None = None
        self._on_end: OnEnd = lambda _: None
        self._whole_layers = 0
        self._layout = layout
        self._on_free = on_free
        self._timer: TimerHandle | None = None
        self._hidden_state = IncomingHiddenState(reservation.transfer_id, hidden_format)
        self._ended = asyncio.Event()
        self._first_ack_unix_ns = 0

    @property
    def state(self) -> TransferState:
        return self.states.state

    @property
    def active(self) -> bool:
        """Whether it may still complete."""
        return self.states.state in ACTIVE_STATES

    @property
    def quiesced(self) -> bool:
        """Whether nothing writes into the blocks any more: no rank, no late write, no local copy (I1)."""
        copying = self.copies is not None and self.copies.running
        return not (self.writers or self.quarantines or copying)

    @property
    def landed(self) -> bool:
        """Whether everything that prefill sends has landed. Copies and checks of it may still be missing."""
        return self.ledger is not None and self.ledger.complete and self._hidden_state.complete

    @property
    def whole(self) -> bool:
        """Whether nothing is missing any more (I3)."""
        copied = self.copies is None or not self.copies.missing_keys
        checked = self.checks is None or not self.checks.pending_keys
        return self.landed and copied and checked

    async def wait(self) -> TransferSummary:
        """Returns when the transfer is complete. Its own deadline bounds the wait.

        Raises TransferFailed, TransferTimeout naming the missing (rank, layer) keys, LayoutMismatch, or Cancelled.
        """
        await self._ended.wait()
        if isinstance(self._outcome, TransferSummary):
            return self._outcome
        raise self._outcome

    async def hidden_state(self) -> bytes:
        """The last token's hidden state as soon as it is here, which may be before the KV. Raises as `wait`."""
        found = await self._hidden_state.wait()
        if found is None:
            detail = f"transfer {self.transfer_id} ended without a hidden state"
            raise self.error or InternalError(detail)
        return found

    def start(
        self,
        timers: Timers,
        on_timeout: Callable[[IncomingTransfer], None],
        copies: LocalCopies | None,
        checks: RangeChecks | None,
    ) -> None:
        """Calls `on_timeout` at the deadline, unless the transfer ends before. Comes before the first Open."""
        self.copies, self.checks = copies, checks
        self._timer = timers.call_later(self.deadline.remaining_s(), on_timeout, self)

    def has_accepted(self, prefill: WorkerRef, ticket: bytes) -> bool:
        """Whether a rank of this worker writes, or has written, or was to write, with this very ticket."""
        return self.prefill == prefill and hmac.compare_digest(self._ticket, ticket)

    def add_writer(self, peer: PrefillPeer, ticket: bytes) -> None:
        """Lets a rank with a valid ticket write.

        Raises ProtocolViolation when it has no part in the transfer, and LayoutMismatch for other hidden states.
        """
        if self.prefill is not None and self.prefill != peer.ref:
            raise ProtocolViolation(
                f"transfer {self.transfer_id} is being sent by {self.prefill}, not {peer.ref}"
            )
        if any(writer.rank == peer.rank for writer in self.writers):
            raise ProtocolViolation(f"{peer} has opened transfer {self.transfer_id} already")
        ledger = self.ledger
        if ledger is None:
            ledger = Ledger(self._layout, peer.layout, self.reservation)
        if ledger.source_complete(peer.rank) and not self._owes_hidden_state(peer):
            raise ProtocolViolation(f"{peer} has nothing to send for {self.transfer_id}")
        if peer.sends_hidden_state:
            self._hidden_state.require_equal(peer.hidden_format)
        if self.prefill is None:
            self.prefill, self._ticket = peer.ref, ticket
            self._digest_seed = digest_seed(ticket)
        self.ledger = ledger
        self.writers.add(peer)
        if self.state is TransferState.RESERVED:
            self.states.enter(TransferState.OPEN)

    def notify(self, on_layers: OnLayers | None, on_end: OnEnd = lambda _: None) -> None:
        """Calls `on_layers` with the number of first layers that are whole, when it has grown.

        See Receiver.lands_layers. Calls `on_end` once, within the call that ends the transfer.
        """
        self._on_layers, self._on_end = on_layers, on_end

    def remove_writer(self, peer: PrefillPeer) -> None:
        """A rank writes no more for the transfer."""
        self.writers.discard(peer)

    def start_quarantine(self, policy: QuarantinePolicy, now_s: float) -> None:
        """Something may write into the blocks within the policy's time."""
        self.quarantines.append(Quarantine(policy, now_s))

    def advance_quarantines(self, now_s: float) -> None:
        """Drops the quarantines that are over."""
        self.quarantines = [one for one in self.quarantines if not one.advance(now_s)]

    def land(self, peer: PrefillPeer, layer: handoff_pb2.LayerDone) -> None:
        """Counts a range that has landed. Raises as Ledger.land and RangeChecks.land do."""
        if self.ledger is None:
            raise ProtocolViolation(f"{peer} has not opened {self.transfer_id}")
        key = (peer.rank, layer.destination_rank, layer.layer)
        new = self.ledger.land(key, layer.start_token, layer.end_token, layer.payload_bytes)
        if self.states.state is TransferState.OPEN:
            self._first_ack_unix_ns = time.time_ns()
            self.states.enter(TransferState.RECEIVING)
        if self._on_layers is not None and layer.end_token == self.reservation.end_token:
            before, self._whole_layers = self._whole_layers, self.ledger.whole_layers
            if self._whole_layers > before:
                self._on_layers(self._whole_layers)
        if not new or (self.copies is None and self.checks is None):
            return
        sums = self.checks is not None and self.checks.word_sums
        field: Literal["word_sum", "digest"] = "word_sum" if sums else "digest"
        landed = LayerLanded(
            edge=self.ledger.edge(key),
            layer=layer.layer,
            start_token=layer.start_token,
            end_token=layer.end_token,
            digest=getattr(layer, field) if layer.HasField(field) else None,
        )
        if self.copies is not None:
            self.copies.land(landed)
        if self.checks is not None:
            self.checks.land(landed, peer.ref)

    def land_hidden_state(self, peer: PrefillPeer, state: handoff_pb2.HiddenState) -> None:
        """Raises as IncomingHiddenState.receive, and ProtocolViolation for a rank that must not send it."""
        if not peer.sends_hidden_state:
            detail = f"{peer} is not the one to send the hidden state of {self.transfer_id}"
            raise ProtocolViolation(detail)
        self._hidden_state.receive(state, self._digest_seed)

    def require_committed(self, peer: PrefillPeer, payload_bytes: int) -> None:
        """Raises ProtocolViolation when a rank commits before everything of it has landed."""
        ledger = self.ledger
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
        if self.ledger is None:
            return "all layers, because no prefill rank opened it"
        parts = [self.ledger.missing()]
        parts += [one.missing() for one in (self.copies, self.checks) if one is not None]
        if not self._hidden_state.complete:
            parts.append("the hidden state")
        return "; ".join(part for part in parts if part)

    def complete(self) -> None:
        """Nothing is missing any more."""
        ledger, copies = self.ledger, self.copies
        assert ledger is not None
        assert self.prefill is not None
        self.states.enter(TransferState.COMPLETE)
        local_bytes = 0 if copies is None else copies.copied_bytes
        counts = ledger.ack_count, ledger.payload_bytes, local_bytes
        self._end(TransferSummary(*counts, self.prefill, self._first_ack_unix_ns))

    def fail(self, error: HeadraceError, now_s: float) -> None:
        """It cannot complete. Its blocks are released once it has quiesced."""
        self.error = error
        self.failed_s = now_s
        for jobs in (self.copies, self.checks):
            if jobs is not None:
                jobs.stop()
        self.states.enter(TransferState.FAILED)
        self._end(error)
        self.states.enter(TransferState.DRAINING)

    def start_jobs(self) -> None:
        """Copies and checks what has landed, while it is active. Raises the error that fails it."""
        if not self.active:
            return
        if self.copies is not None:
            self.copies.start()
        if self.checks is not None:
            self.checks.start(self._digest_seed)

    def free(self) -> None:
        """Nothing writes into the blocks any more."""
        self.states.enter(TransferState.FREE)
        if self._on_free is not None:
            self._on_free(self)

    def _owes_hidden_state(self, peer: PrefillPeer) -> bool:
        return peer.sends_hidden_state and not self._hidden_state.complete

    def _end(self, outcome: TransferSummary | HeadraceError) -> None:
        self._outcome = outcome
        if self._timer is not None:
            self._timer.cancel()
        self._hidden_state.end()
        self._ended.set()
        self._on_end(outcome)
