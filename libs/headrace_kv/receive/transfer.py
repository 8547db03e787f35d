"""One transfer as decode sees it: its state, who may write, and how it ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InternalError,
    KvCorrupt,
    LayoutMismatch,
    ProtocolViolation,
    TransferFailed,
    TransferTimeout,
)
from headrace_kv.handoff.checksum import is_digested
from headrace_kv.handoff.clock import TimerHandle
from headrace_kv.handoff.leases import Quarantine
from headrace_kv.handoff.logits import LOGITS_RANK, IncomingLogits
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_kv.plan.shard_map import Edge, Key
from headrace_kv.receive.ledger import Ledger
from headrace_kv.receive.state import ACTIVE_STATES, StateMachine, TransferState


@dataclass(eq=False, slots=True)
class PrefillPeer:
    """One prefill rank's stream.

    `send` queues a message to it; `end` ends the stream with an error. `transfers` are those in which it may write.
    """

    ref: WorkerRef
    rank: int
    layout: KvLayout
    send: Callable[[handoff_pb2.HandoffResponse], None]
    end: Callable[[HeadraceError], None]
    transfers: dict[str, IncomingTransfer] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ref}"

    def refuse(self, transfer_id: str, reason: str, detail: str) -> None:
        """Tells the rank that a transfer is over for it."""
        cancel = handoff_pb2.Cancel(transfer_id=transfer_id, reason=reason, detail=detail)
        self.send(handoff_pb2.HandoffResponse(cancel=cancel))


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """What a whole transfer took. `acknowledgement_count` counts landed pieces, duplicates apart.

    `payload_bytes` crossed the network, `local_bytes` were passed on among decode ranks of one host.
    """

    acknowledgement_count: int
    payload_bytes: int
    local_bytes: int
    prefill: WorkerRef
    first_ack_unix_ns: int
    complete_unix_ns: int


@dataclass(frozen=True, slots=True)
class LandedPiece:
    """Tokens [start_token, end_token) of one key, and the digest of what was sent."""

    edge: Edge
    layer: int
    start_token: int
    end_token: int
    digest: int

    @property
    def key(self) -> Key:
        """What the ledger counts it by."""
        return (self.edge.source_rank, self.edge.destination_rank, self.layer)

    def __str__(self) -> str:
        edge = self.edge
        return f"layer {self.layer} from rank {edge.source_rank} to rank {edge.destination_rank}"


class IncomingTransfer:
    """A reservation being filled. The receiver owns it; others only wait for it and look at it.

    `unchecked` are pieces whose digests are to be compared, `checking` while some are.
    `copying` while a local copy may write; `ended_locally` tells that copy's thread to stop. With `logits_bytes` it is
    not whole without so many bytes of logits.
    """

    def __init__(
        self,
        reservation: Reservation,
        layout: KvLayout,
        deadline: Deadline,
        on_free: Callable[[IncomingTransfer], None] | None = None,
        digest_share: float = 0.0,
        on_advance: Callable[[IncomingTransfer], None] | None = None,
        logits_bytes: int = 0,
    ) -> None:
        self.reservation = reservation
        self.deadline = deadline
        self.ledger: Ledger | None = None
        self.prefill: WorkerRef | None = None
        self.error: HeadraceError | None = None
        self.timer: TimerHandle | None = None
        self.failed_s = 0.0
        self.writers: set[PrefillPeer] = set()
        self.quarantines: list[Quarantine] = []
        self.copying = False
        self.unchecked: deque[LandedPiece] = deque()
        self.checking = False
        self.ended_locally = threading.Event()
        self._layout = layout
        self._on_free = on_free
        self._on_advance = on_advance
        self._digest_share = digest_share
        self._logits = IncomingLogits(reservation.transfer_id, logits_bytes)
        self._states = StateMachine(reservation.transfer_id)
        self._ended = asyncio.Event()
        self._first_ack_unix_ns = 0

    @property
    def transfer_id(self) -> str:
        return self.reservation.transfer_id

    @property
    def state(self) -> TransferState:
        return self._states.state

    @property
    def transitions(self) -> tuple[tuple[TransferState, int], ...]:
        """The states that it has been in, and when it entered each, in Unix nanoseconds."""
        return self._states.transitions

    @property
    def active(self) -> bool:
        """Whether it may still become whole."""
        return self.state in ACTIVE_STATES

    @property
    def quiet(self) -> bool:
        """Whether nothing writes into the blocks any more, from outside or locally."""
        return not self.writers and not self.quarantines and not self.copying

    @property
    def landed(self) -> bool:
        """Whether prefill's part is whole, so that only copies between decode ranks may be missing."""
        return self.ledger is not None and self.ledger.landed and self._logits.complete

    @property
    def whole(self) -> bool:
        """Whether nothing is missing any more."""
        return self.ledger is not None and self.ledger.complete and self._logits.complete

    async def wait(self) -> TransferSummary:
        """Returns when every expected key has landed.

        Raises TransferFailed, TransferTimeout naming the missing (rank, layer) keys, LayoutMismatch, or Cancelled.
        The transfer's own deadline bounds the wait.
        """
        await self._ended.wait()
        if self.error is not None:
            raise self.error
        if self.ledger is None or self.prefill is None:
            raise InternalError(f"transfer {self.transfer_id} ended without a sender")
        return TransferSummary(
            acknowledgement_count=self.ledger.ack_count,
            payload_bytes=self.ledger.payload_bytes,
            local_bytes=self.ledger.local_bytes,
            prefill=self.prefill,
            first_ack_unix_ns=self._first_ack_unix_ns,
            complete_unix_ns=self.entered_unix_ns(TransferState.COMPLETE),
        )

    async def logits(self) -> bytes:
        """The last token's logits, when they have come, however much of the cache has. Raises as `wait`."""
        found = await self._logits.wait()
        if found is None:
            raise self.error or InternalError(f"transfer {self.transfer_id} ended without logits")
        return found

    def entered_unix_ns(self, state: TransferState) -> int:
        """When the transfer entered a state, 0 if it has not."""
        return self._states.entered_unix_ns(state)

    def admit(self, peer: PrefillPeer) -> None:
        """Lets a rank write. Raises ProtocolViolation when it has no part in the transfer."""
        if self.prefill is not None and self.prefill != peer.ref:
            raise ProtocolViolation(
                f"transfer {self.transfer_id} is being sent by {self.prefill}, not {peer.ref}"
            )
        if any(writer.rank == peer.rank for writer in self.writers):
            raise ProtocolViolation(f"{peer} has opened transfer {self.transfer_id} already")
        ledger = self.ledger
        if ledger is None:
            ledger = Ledger(self._layout, peer.layout, self.reservation)
        layers_due = peer.rank in ledger.source_ranks and not ledger.source_complete(peer.rank)
        if not layers_due and not self._owes_logits(peer):
            raise ProtocolViolation(f"{peer} has nothing to send for {self.transfer_id}")
        self.ledger, self.prefill = ledger, peer.ref
        self.writers.add(peer)
        if self.state is TransferState.RESERVED:
            self._states.enter(TransferState.OPEN)

    def reservation_message(self) -> handoff_pb2.HandoffResponse:
        """Where a rank that was admitted may write."""
        reservation = self.reservation
        return handoff_pb2.HandoffResponse(
            reservation=handoff_pb2.Reservation(
                transfer_id=self.transfer_id,
                block_ids=reservation.block_ids,
                start_token=reservation.start_token,
                end_token=reservation.end_token,
                further_block_ids=[
                    handoff_pb2.BlockList(block_ids=block_ids)
                    for block_ids in reservation.further_block_ids
                ],
            )
        )

    def land(self, peer: PrefillPeer, layer: handoff_pb2.LayerDone) -> None:
        """Counts a landed piece. Raises as Ledger.land does, and ProtocolViolation when its digest is missing."""
        if self.ledger is None:
            raise ProtocolViolation(f"{peer} has not opened {self.transfer_id}")
        key = (peer.rank, layer.destination_rank, layer.layer)
        new = self.ledger.land(key, layer.start_token, layer.end_token, layer.payload_bytes)
        if self.state is TransferState.OPEN:
            self._first_ack_unix_ns = time.time_ns()
            self._states.enter(TransferState.RECEIVING)
        if new and is_digested(self._digest_share, self.transfer_id, layer.layer):
            if not layer.HasField("digest"):
                raise ProtocolViolation(
                    f"{peer} gave no digest of layer {layer.layer} of {self.transfer_id}"
                )
            self.ledger.await_check(key, layer.end_token)
            edge = self.ledger.edge(key)
            self.unchecked.append(
                LandedPiece(edge, layer.layer, layer.start_token, layer.end_token, layer.digest)
            )

    def _owes_logits(self, peer: PrefillPeer) -> bool:
        return peer.rank == LOGITS_RANK and not self._logits.complete

    def take_logits(self, peer: PrefillPeer, part: handoff_pb2.LogitsPart) -> None:
        """Adds a part. Raises as IncomingLogits.take, and ProtocolViolation for a rank that is not to send them."""
        if peer.rank != LOGITS_RANK:
            raise ProtocolViolation(f"{peer} is not the one to send logits of {self.transfer_id}")
        self._logits.receive_part(part)

    def check_commit(self, peer: PrefillPeer, payload_bytes: int) -> None:
        """Raises ProtocolViolation when a rank claims to be ready but has not landed everything."""
        ledger = self.ledger
        if ledger is None or not ledger.source_complete(peer.rank) or self._owes_logits(peer):
            raise ProtocolViolation(
                f"{peer} committed transfer {self.transfer_id} although {self.missing()} are missing"
            )
        landed_bytes = ledger.bytes_from(peer.rank)
        if payload_bytes != landed_bytes:
            raise ProtocolViolation(
                f"{peer} committed {payload_bytes} bytes of {self.transfer_id} but acknowledged {landed_bytes}"
            )

    def missing(self) -> str:
        """What has not landed, for people."""
        if self.ledger is None:
            return "all layers, because no prefill rank opened it"
        layers = self.ledger.missing()
        if self._logits.complete:
            return layers
        return f"{layers}; the logits" if layers else "the logits"

    def too_late(self) -> TransferTimeout:
        """The error of a deadline that has passed."""
        missing = self.missing()
        return TransferTimeout(
            f"transfer {self.transfer_id} is not whole in time; missing are {missing}",
            metadata={"transfer_id": self.transfer_id, "missing": missing},
        )

    def complete(self) -> None:
        """All has landed."""
        self._states.enter(TransferState.COMPLETE)
        self._end()

    def fail(self, error: HeadraceError, now_s: float) -> None:
        """It will not become whole; the blocks stay its own until it is quiet."""
        self.error = error
        self.failed_s = now_s
        self.ended_locally.set()
        self._states.enter(TransferState.FAILED)
        self._end()
        self._states.enter(TransferState.DRAINING)

    def advanced(self) -> None:
        """Something has landed or was checked, or the transfer has ended."""
        if self._on_advance is not None:
            self._on_advance(self)

    def free(self) -> None:
        """The blocks are nobody's target any more."""
        self._states.enter(TransferState.FREE)
        if self._on_free is not None:
            self._on_free(self)

    def _end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self._logits.end()
        self._ended.set()


_BY_REASON: dict[str, type[HeadraceError]] = {
    kind.reason: kind
    for kind in (Cancelled, KvCorrupt, LayoutMismatch, TransferFailed, TransferTimeout)
}


def ended_error(reason: str, detail: str, what: str) -> HeadraceError:
    """The error of a transfer that was ended for a reason: a TransferFailed unless the reason has a better class."""
    kind = _BY_REASON.get(reason, TransferFailed)
    return kind(f"{what}: {detail}" if detail else what, metadata={"reason": reason})
