"""Owns decode's side of every transfer. Runs on one event loop; nothing here blocks."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Draining,
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    KvCorrupt,
    ProtocolViolation,
    TransferFailed,
)
from headrace_kv.handoff.clock import TimerHandle, Timers, running_timers
from headrace_kv.handoff.leases import Quarantine, QuarantinePolicy
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_kv.receive.corrupt_senders import CorruptSenderTracker
from headrace_kv.receive.handshake import validate_handshake
from headrace_kv.receive.local_broadcast import LocalBroadcast, LocalCopyJobs
from headrace_kv.receive.pending_opens import PendingOpens
from headrace_kv.receive.state import TransferState
from headrace_kv.receive.transfer import IncomingTransfer, PrefillPeer, TransferSummary, ended_error
from headrace_kv.receive.verification import DigestChecks, DigestJobs

__all__ = ["IncomingTransfer", "Receiver", "ReceiverLimits", "TransferState", "TransferSummary"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """Bounds of a receiver.

    `open_wait_s`: how long an Open may come before its reservation. `waiting_opens`: how many may. `remembered`: ended
    transfers whose late messages are recognised. `quiesce_timeout_s`: how long a rank may take to stop writing before
    its stream is ended; longer than a write can last.
    """

    open_wait_s: float = 2.0
    waiting_opens: int = 1024
    remembered: int = 4096
    quiesce_timeout_s: float = 30.0


class Receiver:
    """The transfers into one decode worker.

    `on_released(transfer_id)` is called once for each transfer that ended without being whole, when its blocks may be
    reused. `quarantine_s` must be longer than a transport's write can last. `broadcast` copies between the ranks of a
    layout that says they do. `timers` is the running event loop unless given. `checks` compares digests with what
    has landed; whoever made it closes it.
    """

    def __init__(
        self,
        *,
        ref: WorkerRef,
        layout: KvLayout,
        on_released: Callable[[str], None],
        lease_ttl_s: float = 5.0,
        quarantine_s: float = 15.0,
        limits: ReceiverLimits | None = None,
        broadcast: LocalBroadcast | None = None,
        timers: Timers | None = None,
        checks: DigestChecks | None = None,
    ) -> None:
        """Raises InternalError when a layout's ranks have nothing that copies between them."""
        if layout.broadcast_width > 1 and broadcast is None:
            raise InternalError("the layout has a broadcast_width, but nothing copies locally")
        self.lease_ttl_s = lease_ttl_s
        self._ref = ref
        self._layout = layout
        self._on_released = on_released
        self._limits = limits or ReceiverLimits()
        self._timers = timers
        self._policy = QuarantinePolicy(lease_ttl_s, quarantine_s)
        self._transfers: dict[str, IncomingTransfer] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._waiting = PendingOpens(
            self._limits.waiting_opens, self._limits.open_wait_s, self._give_up, timers
        )
        self._passes = LocalCopyJobs(broadcast, self._passed_on) if broadcast is not None else None
        self._checks = checks
        self._digests = DigestJobs(checks, self._checked) if checks is not None else None
        self._distrust = CorruptSenderTracker(checks.mismatch_limit if checks is not None else 1)
        self._peers: set[PrefillPeer] = set()
        self._tick_handle: TimerHandle | None = None
        self._draining = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def active_count(self) -> int:
        """Transfers that may still become whole."""
        return sum(transfer.active for transfer in self._transfers.values())

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of transfers that failed but may still be written into."""
        return sum(
            sum(map(len, transfer.reservation.block_ids_by_group))
            for transfer in self._transfers.values()
            if not transfer.active
        )

    @property
    def digest_share(self) -> float:
        """The part of all (transfer, layer) pairs whose digests prefill ranks are to tell, 0 to 1."""
        return self._checks.share if self._checks is not None else 0.0

    @property
    def distrusted(self) -> tuple[WorkerRef, ...]:
        """Prefill workers that may not write here any more, because too much of theirs arrived broken."""
        return self._distrust.refs

    def reserve(
        self,
        reservation: Reservation,
        deadline: Deadline,
        on_free: Callable[[IncomingTransfer], None] | None = None,
        on_advance: Callable[[IncomingTransfer], None] | None = None,
        *,
        logits_bytes: int = 0,
    ) -> IncomingTransfer:
        """Lets prefill ranks write into the blocks until the transfer is whole or the deadline has passed.

        `on_free` is called when nobody may write into them any more, however the transfer ended; `on_advance` whenever
        something has landed, and once the transfer is whole or has failed. So many bytes of logits belong to it too.

        Raises DuplicateTransfer, Draining, or InternalError for blocks that do not hold the tokens.
        """
        transfer_id = reservation.transfer_id
        if self._draining:
            raise Draining("the decode worker takes no new transfers")
        if transfer_id in self._transfers or transfer_id in self._ended:
            raise DuplicateTransfer(
                f"transfer {transfer_id} was used before", metadata={"transfer_id": transfer_id}
            )
        self._check(reservation)
        transfer = IncomingTransfer(
            reservation,
            self._layout,
            deadline,
            on_free,
            self.digest_share,
            on_advance,
            logits_bytes,
        )
        self._transfers[transfer_id] = transfer
        transfer.timer = running_timers(self._timers).call_later(
            deadline.remaining_s(), self._time_out, transfer
        )
        for peer in self._waiting.take(transfer_id):
            self._admit(transfer, peer)
        return transfer

    def cancel(self, transfer_id: str, reason: str, detail: str) -> None:
        """Ends a transfer that is not whole. Later Opens of it are refused, also when it is not known yet."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            self._fail(transfer, ended_error(reason, detail, f"transfer {transfer_id} was ended"))
        elif transfer_id not in self._ended:
            self._remember(transfer_id, detail or reason)
            for peer in self._waiting.take(transfer_id):
                peer.refuse(transfer_id, reason, detail)

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new, waits for what runs, then ends the rest, every stream and every timer."""
        self._draining = True
        deadline = Deadline.after(timeout_s)
        while self._transfers and not deadline.expired:
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await self._changed.wait()
            except TimeoutError:
                break
        for transfer_id in list(self._transfers):
            self.cancel(transfer_id, Draining.reason, "the decode worker is shutting down")
        self.close()

    def close(self) -> None:
        """Ends every stream and timer at once. Blocks of transfers in flight are never given back."""
        self._draining = self._closed = True
        self._waiting.clear()
        for transfer in self._transfers.values():
            if transfer.active:
                transfer.fail(Draining("the decode worker is shutting down"), self._now_s())
        for peer in list(self._peers):
            peer.end(Draining("the decode worker is shutting down"))
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None

    def connect(
        self,
        hello: handoff_pb2.Hello,
        send: Callable[[handoff_pb2.HandoffResponse], None],
        end: Callable[[HeadraceError], None],
    ) -> PrefillPeer:
        """Admits a prefill rank's stream.

        Raises StaleIncarnation, LayoutMismatch naming the fields, ProtocolViolation for an impossible rank, Draining.
        """
        if self._closed:
            raise Draining("the decode worker takes no new streams")
        ref, layout = validate_handshake(hello, self._ref, self._layout)
        peer = PrefillPeer(ref, hello.rank, layout, send, end)
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: PrefillPeer) -> None:
        """The stream has ended: the rank stops by itself, at the latest when its lease runs out."""
        self._peers.discard(peer)
        self._waiting.forget(peer)
        for transfer in list(peer.transfers.values()):
            transfer.writers.discard(peer)
            transfer.quarantines.append(Quarantine(self._policy, self._now_s()))
            if transfer.landed:
                continue
            what = f"the handoff stream of {peer} ended; missing are {transfer.missing()}"
            self._fail(transfer, TransferFailed(what, metadata={"prefill": str(peer.ref)}))
        peer.transfers.clear()
        self._arm()

    def handle(self, peer: PrefillPeer, request: handoff_pb2.HandoffRequest) -> None:
        """Takes one message. A wrong one ends at most the transfer that it names (I6)."""
        match request.WhichOneof("message"):
            case "layers_done":
                for layer in request.layers_done.layers:
                    self._land(peer, layer)
            case "open":
                self._open(peer, request.open.transfer_id)
            case "logits":
                self._take_logits(peer, request.logits)
            case "commit":
                self._commit(peer, request.commit)
            case "failed":
                self._hear_failure(peer, request.failed)
            case "quiesced":
                self._quiesce(peer, request.quiesced.transfer_id)
            case _:
                _log.warning("%s sent a message that is not in order on a stream", peer)

    def _open(self, peer: PrefillPeer, transfer_id: str) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            self._admit(transfer, peer)
        elif transfer_id in self._ended:
            peer.refuse(transfer_id, "CANCELLED", self._ended[transfer_id])
        elif self._draining or not self._waiting.add(transfer_id, peer):
            detail = "too many transfers are opened before their reservation"
            peer.refuse(transfer_id, "QUEUE_FULL", detail)

    def _admit(self, transfer: IncomingTransfer, peer: PrefillPeer) -> None:
        transfer_id = transfer.transfer_id
        if not transfer.active:
            reason = transfer.error.reason if transfer.error else "CANCELLED"
            peer.refuse(transfer_id, reason, "the transfer has ended")
            return
        if transfer_id in peer.transfers:
            # Our answer was lost, or the Open came twice.
            peer.send(transfer.reservation_message())
            return
        try:
            self._distrust.check(peer.ref)
            transfer.admit(peer)
        except HeadraceError as error:
            _log.warning("refused an Open: %s", error.detail)
            peer.refuse(transfer_id, error.reason, error.detail)
            return
        peer.transfers[transfer_id] = transfer
        peer.send(transfer.reservation_message())

    def _land(self, peer: PrefillPeer, layer: handoff_pb2.LayerDone) -> None:
        transfer = peer.transfers.get(layer.transfer_id)
        if transfer is None:
            if layer.transfer_id not in self._ended:
                _log.warning("%s acknowledged transfer %s unopened", peer, layer.transfer_id)
            return
        if not transfer.active:
            return
        try:
            transfer.land(peer, layer)
            self._advance(transfer)
        except HeadraceError as error:
            self._fail(transfer, error)

    def _take_logits(self, peer: PrefillPeer, part: handoff_pb2.LogitsPart) -> None:
        transfer = peer.transfers.get(part.transfer_id)
        if transfer is None or not transfer.active:
            return
        try:
            transfer.take_logits(peer, part)
            self._advance(transfer)
        except HeadraceError as error:
            self._fail(transfer, error)

    def _advance(self, transfer: IncomingTransfer) -> None:
        if transfer.whole:
            transfer.complete()
            self._release(transfer)
            transfer.advanced()
            return
        if self._digests is not None:
            self._digests.advance(transfer)
        if self._passes is not None:
            self._passes.advance(transfer)
        transfer.advanced()

    def _passed_on(self, transfer: IncomingTransfer, error: HeadraceError | None) -> None:
        """A local copy has ended."""
        if transfer.active and error is None:
            try:
                self._advance(transfer)
            except HeadraceError as refusal:
                error = refusal
        if error is not None:
            self._fail(transfer, error)
        if not self._closed:
            self._release_if_quiet(transfer)

    def _checked(self, transfer: IncomingTransfer, error: HeadraceError | None) -> None:
        """Some digests have been compared."""
        if not transfer.active:
            return
        if error is None:
            try:
                self._advance(transfer)
            except HeadraceError as refusal:
                error = refusal
        if error is not None:
            if isinstance(error, KvCorrupt) and transfer.prefill is not None:
                self._distrust.note(transfer.prefill)
            self._fail(transfer, error)

    def _commit(self, peer: PrefillPeer, commit: handoff_pb2.Commit) -> None:
        transfer = peer.transfers.get(commit.transfer_id)
        if transfer is None:
            return
        if transfer.active:
            try:
                transfer.check_commit(peer, commit.payload_bytes)
            except ProtocolViolation as error:
                self._fail(transfer, error)
                return
        self._silence(transfer, peer)

    def _hear_failure(self, peer: PrefillPeer, failed: handoff_pb2.Failed) -> None:
        transfer = peer.transfers.get(failed.transfer_id)
        if transfer is not None and not transfer.landed:
            what = f"{peer} failed to send {transfer.transfer_id}"
            self._fail(transfer, ended_error(failed.reason, failed.detail, what))

    def _quiesce(self, peer: PrefillPeer, transfer_id: str) -> None:
        transfer = peer.transfers.get(transfer_id)
        if transfer is None:
            return
        self._silence(transfer, peer)
        if transfer.active and not transfer.landed:
            self._fail(transfer, TransferFailed(f"{peer} stopped sending {transfer_id}"))

    def _silence(self, transfer: IncomingTransfer, peer: PrefillPeer) -> None:
        """The rank writes no more for the transfer."""
        transfer.writers.discard(peer)
        peer.transfers.pop(transfer.transfer_id, None)
        self._release_if_quiet(transfer)

    def _time_out(self, transfer: IncomingTransfer) -> None:
        self._fail(transfer, transfer.too_late())

    def _fail(self, transfer: IncomingTransfer, error: HeadraceError) -> None:
        if not transfer.active:
            return
        _log.info("transfer %s failed: %s", transfer.transfer_id, error.detail)
        transfer.fail(error, self._now_s())
        transfer.advanced()
        for peer in transfer.writers:
            peer.refuse(transfer.transfer_id, error.reason, error.detail)
        self._release_if_quiet(transfer)
        self._arm()

    def _release_if_quiet(self, transfer: IncomingTransfer) -> None:
        if transfer.state is TransferState.DRAINING and transfer.quiet:
            self._release(transfer)
            self._on_released(transfer.transfer_id)

    def _release(self, transfer: IncomingTransfer) -> None:
        transfer.free()
        for peer in transfer.writers:
            peer.transfers.pop(transfer.transfer_id, None)
        del self._transfers[transfer.transfer_id]
        self._remember(transfer.transfer_id, "the transfer has ended")
        self._changed.set()

    def _remember(self, transfer_id: str, why: str) -> None:
        self._ended[transfer_id] = why
        while len(self._ended) > self._limits.remembered:
            self._ended.popitem(last=False)

    def _arm(self) -> None:
        """Keeps the clock running while a failed transfer waits to be quiet."""
        if self._tick_handle is None and not self._closed and self.quarantined_blocks:
            timers = running_timers(self._timers)
            self._tick_handle = timers.call_later(self._policy.tick_s, self._tick)

    def _tick(self) -> None:
        self._tick_handle = None
        now_s = self._now_s()
        for transfer in list(self._transfers.values()):
            if transfer.active:
                continue
            transfer.quarantines = [q for q in transfer.quarantines if not q.advance(now_s)]
            self._release_if_quiet(transfer)
            if now_s - transfer.failed_s > self._limits.quiesce_timeout_s:
                for peer in list(transfer.writers):
                    peer.end(
                        ProtocolViolation(f"{peer} did not stop {transfer.transfer_id} in time")
                    )
        self._arm()

    def _give_up(self, transfer_id: str, peer: PrefillPeer) -> None:
        peer.refuse(transfer_id, "NOT_FOUND", f"{self._ref} has no reservation for it")

    def _check(self, reservation: Reservation) -> None:
        fault = reservation.find_fault(self._layout)
        if fault or reservation.start_token == reservation.end_token:
            raise InternalError(
                f"the reservation of transfer {reservation.transfer_id} {fault or 'has no tokens'}"
            )

    def _now_s(self) -> float:
        return running_timers(self._timers).time()
