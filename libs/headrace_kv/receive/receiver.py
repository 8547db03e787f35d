"""Decode's side of the handoff: reservations, prefill ranks' streams, and their messages.

Runs on one event loop; nothing here blocks.
"""

from __future__ import annotations

import logging
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    Cancelled,
    Draining,
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    KvCorrupt,
    LayoutMismatch,
    PermissionDenied,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
    TransferTimeout,
    Unauthenticated,
    class_of,
)
from headrace_common.limits import WRITE_LEASE_S, WRITE_QUARANTINE_S
from headrace_common.tasks import Recent
from headrace_common.tickets import TicketKey
from headrace_kv.compatibility import require_compatible
from headrace_kv.hidden_state import HiddenFormat, format_of
from headrace_kv.layout import KvLayout, WorkerRef, layout_from_proto
from headrace_kv.leases import QuarantinePolicy, Timers
from headrace_kv.messages import Reservation, reservation_to_proto
from headrace_kv.receive.local_broadcast import LocalBroadcast
from headrace_kv.receive.transfer import (
    IncomingTransfer,
    PrefillPeer,
    TransferState,
    TransferSummary,
)
from headrace_kv.receive.transfer_table import IncomingTransfers
from headrace_kv.receive.verification import CorruptSenderTracker, DigestChecks
from headrace_kv.shard_map import shards
from headrace_kv.tickets import HandoffTickets

__all__ = ["IncomingTransfer", "Receiver", "ReceiverLimits", "TransferState", "TransferSummary"]

_log = logging.getLogger(__name__)

# Verifying a signature takes 0.1 ms. A rank with tickets of its router is never refused this often in a row.
_REFUSED_TICKETS_MAX = 64
_UNKNOWN_OPENS_MAX = 1_024
"""Opens of transfers that are not reserved, of one stream, without another in between."""
_LEFT_MAX = 256
_CLASSES_OF_ENDINGS = (Cancelled, KvCorrupt, LayoutMismatch, TransferFailed, TransferTimeout)


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """Bounds of a receiver.

    `remembered`: how many ended transfers are kept to recognise late messages. `quiesce_timeout_s`: after this time,
    longer than any write, the stream of a rank that has not stopped writing is ended.
    """

    remembered: int = 4096
    quiesce_timeout_s: float = 30.0


class _Refusals:
    """Refuses Opens, and ends a stream with many of them in a row. The transfers are not affected (I6)."""

    def __init__(self) -> None:
        self._tickets: Counter[PrefillPeer] = Counter()
        self._unknown: Counter[PrefillPeer] = Counter()

    def has_ended(self, peer: PrefillPeer) -> bool:
        """Whether the stream ends, so that nothing more of it is of interest."""
        refused, unknown = self._tickets[peer], self._unknown[peer]
        return refused >= _REFUSED_TICKETS_MAX or unknown >= _UNKNOWN_OPENS_MAX

    def forget(self, peer: PrefillPeer) -> None:
        """The stream has opened a transfer, or it has ended."""
        self._tickets.pop(peer, None)
        self._unknown.pop(peer, None)

    def add_unknown(self, peer: PrefillPeer, transfer_id: str, ref: WorkerRef) -> None:
        """The worker `ref` has no reservation for the transfer."""
        peer.refuse(transfer_id, "NOT_FOUND", f"{ref} has no reservation for it")
        self._unknown[peer] += 1
        if self._unknown[peer] == _UNKNOWN_OPENS_MAX:
            detail = f"{peer} opened {_UNKNOWN_OPENS_MAX} transfers that are not reserved here"
            _log.warning("%s; its stream ends", detail)
            peer.end(ProtocolViolation(detail))

    def add_ticket(self, peer: PrefillPeer, transfer_id: str, error: HeadraceError) -> None:
        """The ticket is not valid."""
        peer.refuse(transfer_id, error.reason, error.detail, error.metadata["ticket"])
        self._tickets[peer] += 1
        refused = self._tickets[peer]
        if refused == 1:
            _log.warning("refused %s to fill transfer %s: %s", peer, transfer_id, error.detail)
        elif refused == _REFUSED_TICKETS_MAX:
            _log.warning("refused %d tickets of %s and ends its stream", refused, peer)
            peer.end(error)


class Receiver:
    """The transfers into one decode worker.

    `tickets` decides which prefill worker may fill a transfer. `on_released(transfer_id)` is called once for each
    failed transfer, when its blocks may be reused. `quarantine_s` must be longer than a transport's write can last.
    `timers` is the running event loop unless given. The owner of `broadcast` and `checks` closes them.
    """

    def __init__(
        self,
        *,
        ref: WorkerRef,
        layout: KvLayout,
        tickets: HandoffTickets,
        on_released: Callable[[str], None],
        lease_ttl_s: float = WRITE_LEASE_S,
        quarantine_s: float = WRITE_QUARANTINE_S,
        limits: ReceiverLimits | None = None,
        timers: Timers | None = None,
        broadcast: LocalBroadcast | None = None,
        checks: DigestChecks | None = None,
    ) -> None:
        """Raises InternalError when a layout's ranks must copy between them and there is no broadcast."""
        # The network plan of such a layout leaves ranks unwritten: without the copies, transfers would complete early.
        if layout.broadcast_width > 1 and broadcast is None:
            raise InternalError("the layout has a broadcast_width, but nothing copies locally")
        limits = limits or ReceiverLimits()
        self.lease_ttl_s = lease_ttl_s
        self._ref = ref
        self._layout = layout
        self._tickets = tickets
        self._refusals = _Refusals()
        self._broadcast = broadcast
        self._checks = checks
        self._trackers = [] if checks is None else [checks.corrupt_senders]
        self._policy = QuarantinePolicy(lease_ttl_s, quarantine_s)
        self._transfers = IncomingTransfers(
            on_released,
            self._policy,
            quiesce_timeout_s=limits.quiesce_timeout_s,
            ended=Recent(limits.remembered),
            timers=timers,
        )
        self._peers: set[PrefillPeer] = set()
        # Workers with streams that have ended, and when the lease of the last one has.
        self._left: Recent[WorkerRef, float] = Recent(_LEFT_MAX)
        # The ranks that have opened a transfer without blocks yet, with their tickets.
        self._expected: dict[str, dict[PrefillPeer, bytes]] = {}
        self._draining = False
        self._closed = False

    @property
    def lands_layers(self) -> bool:
        """Whether a layer is whole once it has landed: neither copied nor compared then."""
        return self._broadcast is None and self._checks is None

    @property
    def active_count(self) -> int:
        """Transfers that may still complete."""
        return len([*self._transfers]) - len(self._transfers.failed)

    def count_states(self) -> dict[str, int]:
        """The number of transfers that hold blocks, by state."""
        counts = {state.value: 0 for state in TransferState if state is not TransferState.FREE}
        for transfer in self._transfers:
            counts[transfer.state.value] += 1
        return counts

    @property
    def lease_count(self) -> int:
        """Ranks that may write into the blocks of a transfer, over all transfers."""
        return sum(len(transfer.writers) for transfer in self._transfers)

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of transfers that failed but may still be written into."""
        return sum(
            sum(map(len, transfer.reservation.block_ids_by_group))
            for transfer in self._transfers.failed
        )

    @property
    def rejected_senders(self) -> Mapping[WorkerRef, str]:
        """Prefill workers that may not write here any more, and why."""
        return dict(ChainMap(*(dict(tracker.rejected) for tracker in self._trackers)))

    def lease_holders(self, since_s: float) -> frozenset[WorkerRef]:
        """The workers with a write lease now, or at a time after `since_s` by time.monotonic.

        Of those that have left, the last 256 are known.
        """
        left = {ref for ref, end_s in self._left.items() if end_s >= since_s}
        return frozenset(left.union(peer.ref for peer in self._peers))

    def add_tracker(self, tracker: CorruptSenderTracker) -> None:
        """Refuses the senders that `tracker` rejects too."""
        self._trackers.append(tracker)

    def welcome(self) -> handoff_pb2.Welcome:
        """The answer to a Hello."""
        return handoff_pb2.Welcome(
            lease_ttl=duration_from_seconds(self.lease_ttl_s),
            quarantine=duration_from_seconds(self._policy.transport_s),
            digest_share=0.0 if self._checks is None else self._checks.share,
            word_sums=self._checks is not None and self._checks.word_sums,
        )

    def expect(self, transfer_id: str) -> None:
        """Lets an Open of the transfer wait until `reserve` or `cancel`, one of which follows."""
        self._expected[transfer_id] = {}

    def reserve(
        self,
        reservation: Reservation,
        deadline: Deadline,
        on_free: Callable[[IncomingTransfer], None] | None = None,
        *,
        hidden_format: HiddenFormat | None = None,
        signer: TicketKey | None = None,
        sender: tuple[WorkerRef, bytes] | None = None,
    ) -> IncomingTransfer:
        """Lets prefill ranks write into the blocks until the transfer is complete or the deadline has passed.

        `on_free` is called when nothing may write into them any more, however the transfer ended. A hidden
        state of `hidden_format` is part of the transfer, unless None. `signer`: see HandoffTickets. `sender` may fill
        the transfer with this very ticket, whatever it permits.

        Raises DuplicateTransfer, Draining, or InternalError for blocks that do not hold the tokens.
        """
        transfer_id = reservation.transfer_id
        if self._draining:
            raise Draining("the decode worker takes no new transfers")
        if transfer_id in self._transfers.ended or self._transfers.get(transfer_id):
            raise DuplicateTransfer(
                f"transfer {transfer_id} was used before", metadata={"transfer_id": transfer_id}
            )
        fault = reservation.find_fault(self._layout)
        if fault or reservation.start_token == reservation.end_token:
            raise InternalError(
                f"the reservation of transfer {transfer_id} {fault or 'has no tokens'}"
            )
        transfer = IncomingTransfer(
            reservation,
            self._layout,
            deadline,
            on_free,
            hidden_format=hidden_format,
            signer=signer,
            sender=sender,
        )
        resume = partial(self._transfers.resume, transfer)
        broadcast, checks = self._broadcast, self._checks
        self._transfers.add(
            transfer,
            None if broadcast is None else broadcast.copies(reservation, deadline, resume),
            None if checks is None else checks.checks(reservation, resume),
        )
        for peer, ticket in self._expected.pop(transfer_id, {}).items():
            self._add_writer(transfer, peer, ticket)
        return transfer

    def cancel(self, transfer_id: str, reason: str, detail: str) -> None:
        """Ends a transfer that is not complete. Later Opens of it are refused, also when it is not known yet."""
        transfer = self._transfers.get(transfer_id)
        for peer in self._expected.pop(transfer_id, ()):
            peer.refuse(transfer_id, reason, detail)
        if transfer is not None:
            error = _ending_error(reason, detail, f"transfer {transfer_id} was ended")
            self._transfers.fail(transfer, error)
        elif transfer_id not in self._transfers.ended:
            self._transfers.remember_ended(transfer_id, detail or reason)

    async def drain(self, timeout_s: float) -> None:
        """Accepts nothing new, waits for active transfers, then ends the rest, every stream and every timer."""
        self._draining = True
        await self._transfers.wait_empty(Deadline.after(timeout_s))
        for transfer in self._transfers:
            self.cancel(transfer.transfer_id, Draining.reason, "the decode worker is shutting down")
        self.close()

    def close(self) -> None:
        """Ends every stream and timer at once. Blocks of transfers in flight are never given back."""
        self._draining = self._closed = True
        self._transfers.close(Draining("the decode worker is shutting down"))
        for peer in list(self._peers):
            peer.end(Draining("the decode worker is shutting down"))

    def connect(
        self,
        hello: handoff_pb2.Hello,
        send: Callable[[handoff_pb2.HandoffResponse], None],
        end: Callable[[HeadraceError], None],
    ) -> PrefillPeer:
        """Accepts a prefill rank's stream.

        Raises StaleIncarnation, LayoutMismatch naming the fields, ProtocolViolation for an impossible rank, Draining.
        """
        if self._closed:
            raise Draining("the decode worker takes no new streams")
        ref, layout = validate_handshake(hello, self._ref, self._layout)
        peer = PrefillPeer(ref, hello.rank, layout, send, end, format_of(hello))
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: PrefillPeer) -> None:
        """The stream has ended. The rank stops writing by itself, at the latest when its lease runs out."""
        self._peers.discard(peer)
        self._left[peer.ref] = time.monotonic() + self._policy.total_s
        self._refusals.forget(peer)
        for opened in self._expected.values():
            opened.pop(peer, None)
        written = [transfer for transfer in self._transfers if peer in transfer.writers]
        if written:
            _log.warning(
                "the handoff stream of %s ended while %d transfers were written: their blocks stay unused for %g s. If "
                "that process was frozen within a write, the kernel ends it (SIGKILL) before it can write on",
                peer,
                len(written),
                self._policy.total_s,
            )
        for transfer in written:
            self._transfers.quarantine_writer(transfer, peer)
            if not transfer.landed:
                what = f"the handoff stream of {peer} ended; missing are {transfer.missing()}"
                error = TransferFailed(what, metadata={"prefill": str(peer.ref)})
                self._transfers.fail(transfer, error)

    def handle(self, peer: PrefillPeer, request: handoff_pb2.HandoffRequest) -> None:
        """Processes one message. A wrong one ends at most the transfer that it names (I6)."""
        match request.WhichOneof("message"):
            case "layers_done":
                for layer in request.layers_done.layers:
                    self._on_landed(peer, layer)
            case "open":
                self._on_open(peer, request.open.transfer_id, request.open.ticket)
            case "hidden_state":
                self._on_landed(peer, request.hidden_state)
            case "commit":
                self._on_commit(peer, request.commit)
            case "failed":
                self._on_failed(peer, request.failed)
            case "quiesced":
                self._on_quiesced(peer, request.quiesced.transfer_id)
            case _:
                _log.warning("%s sent a message that is not in order on a stream", peer)

    def _opened(self, peer: PrefillPeer, transfer_id: str) -> IncomingTransfer | None:
        """A transfer that the rank may write to."""
        transfer = self._transfers.get(transfer_id)
        return transfer if transfer is not None and peer in transfer.writers else None

    def _on_open(self, peer: PrefillPeer, transfer_id: str, ticket: bytes) -> None:
        if self._refusals.has_ended(peer):
            return
        transfer, opened = self._transfers.get(transfer_id), self._expected.get(transfer_id)
        if transfer is not None:
            self._add_writer(transfer, peer, ticket)
        elif (ended_detail := self._transfers.ended.get(transfer_id)) is not None:
            peer.refuse(transfer_id, "CANCELLED", ended_detail)
        elif opened is None:
            self._refusals.add_unknown(peer, transfer_id, self._ref)
        elif len(opened.keys() | {peer}) <= peer.layout.rank_count:
            # A worker may have many streams, and its tickets are not verified yet.
            opened[peer] = ticket

    def _add_writer(self, transfer: IncomingTransfer, peer: PrefillPeer, ticket: bytes) -> None:
        transfer_id = transfer.transfer_id
        if not transfer.active:
            reason = transfer.error.reason if transfer.error else "CANCELLED"
            peer.refuse(transfer_id, reason, "the transfer has ended")
            return
        # A repeated Open: the first one, or its answer, may have been lost.
        if peer not in transfer.writers:
            try:
                # The ranks of a worker present the same ticket, which is verified once.
                if not transfer.has_accepted(peer.ref, ticket):
                    self._tickets.check(ticket, transfer_id, peer.ref, transfer.signer)
            except (PermissionDenied, Unauthenticated) as error:
                self._refusals.add_ticket(peer, transfer_id, error)
                return
            self._refusals.forget(peer)
            try:
                for tracker in self._trackers:
                    tracker.require_accepted(peer.ref)
                transfer.add_writer(peer, ticket)
            except HeadraceError as error:
                _log.warning("refused an Open: %s", error.detail)
                peer.refuse(transfer_id, error.reason, error.detail)
                return
        peer.send(
            handoff_pb2.HandoffResponse(reservation=reservation_to_proto(transfer.reservation))
        )

    def _on_landed(
        self, peer: PrefillPeer, landed: handoff_pb2.LayerDone | handoff_pb2.HiddenState
    ) -> None:
        transfer = self._opened(peer, landed.transfer_id)
        if transfer is None and landed.transfer_id not in self._transfers.ended:
            # Not a warning: a rank without a ticket could fill the log.
            _log.debug("%s acknowledged transfer %s unopened", peer, landed.transfer_id)
        if transfer is None or not transfer.active:
            return
        try:
            if isinstance(landed, handoff_pb2.LayerDone):
                transfer.land(peer, landed)
            else:
                transfer.land_hidden_state(peer, landed)
            self._transfers.advance(transfer)
        except HeadraceError as error:
            self._transfers.fail(transfer, error)

    def _on_commit(self, peer: PrefillPeer, commit: handoff_pb2.Commit) -> None:
        transfer = self._opened(peer, commit.transfer_id)
        if transfer is None:
            return
        if transfer.active:
            try:
                transfer.require_committed(peer, commit.payload_bytes)
            except ProtocolViolation as error:
                self._transfers.fail(transfer, error)
                return
        self._transfers.remove_writer(transfer, peer)

    def _on_failed(self, peer: PrefillPeer, failed: handoff_pb2.Failed) -> None:
        transfer = self._opened(peer, failed.transfer_id)
        if transfer is not None and not transfer.landed:
            what = f"{peer} failed to send {transfer.transfer_id}"
            self._transfers.fail(transfer, _ending_error(failed.reason, failed.detail, what))

    def _on_quiesced(self, peer: PrefillPeer, transfer_id: str) -> None:
        transfer = self._opened(peer, transfer_id)
        if transfer is None:
            self._expected.get(transfer_id, {}).pop(peer, None)
            return
        self._transfers.remove_writer(transfer, peer)
        if transfer.active and not transfer.landed:
            self._transfers.fail(transfer, TransferFailed(f"{peer} stopped sending {transfer_id}"))


def _ending_error(reason: str, detail: str, what: str) -> HeadraceError:
    """The error of a transfer that was ended for a reason: TransferFailed unless a class here has that reason."""
    kind = class_of(reason)
    if kind is None or kind not in _CLASSES_OF_ENDINGS:
        kind = TransferFailed
    return kind(f"{what}: {detail}" if detail else what, metadata={"reason": reason})


def validate_handshake(
    hello: handoff_pb2.Hello, ref: WorkerRef, layout: KvLayout
) -> tuple[WorkerRef, KvLayout]:
    """The prefill worker and its layout. `ref` and `layout` are decode's.

    Raises StaleIncarnation, LayoutMismatch naming the fields, or ProtocolViolation for an impossible rank.
    """
    meant = WorkerRef(hello.decode_worker_id, hello.decode_incarnation)
    if meant != ref:
        raise StaleIncarnation(
            f"the handoff is meant for {meant}, but this is {ref}",
            metadata={"meant": str(meant), "actual": str(ref)},
        )
    prefill_layout = layout_from_proto(hello.layout)
    require_compatible(layout, prefill_layout)
    for group in prefill_layout.groups:
        shards(prefill_layout.tensor_parallel_size, group.head_count)
    prefill = WorkerRef(hello.worker_id, hello.incarnation)
    if not hello.worker_id or not hello.incarnation:
        raise ProtocolViolation("the Hello names no worker and incarnation")
    if hello.rank >= prefill_layout.rank_count:
        raise ProtocolViolation(
            f"{prefill} has no rank {hello.rank}: its layout has {prefill_layout.rank_count} ranks"
        )
    return prefill, prefill_layout
