"""The receiver with local copies that are under the test's control: completion (I3) and the release of blocks (I1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, ProtocolViolation, TransferFailed
from headrace_common.limits import WRITE_LEASE_S, WRITE_QUARANTINE_S
from headrace_common.tickets import SigningKey, TicketKeys, sign_handoff
from headrace_kv.layout import WorkerRef, layout_to_proto
from headrace_kv.messages import Reservation
from headrace_kv.receive.ledger import LayerLanded
from headrace_kv.receive.local_broadcast import LocalBroadcast, LocalCopies, ResumeTransfer
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.transfer import IncomingTransfer, PrefillPeer, TransferState
from headrace_kv.shard_map import Key
from headrace_kv.tickets import NoTickets, RouterTickets
from tests.model.virtual_time import VirtualDeadline, VirtualTimers
from tests.unit.kv.receive.test_ledger import make_layout
from tests.virtually import virtually

REF = WorkerRef("decode-0", "1")
LATE_WRITE_S = 3.0
TICKET = sign_handoff(SigningKey(), handoff_pb2.HandoffClaims(transfer_id="x0"))


class HeldCopies(LocalCopies):
    """Keeps one key missing and may write into the blocks, until the test ends its work."""

    missing_keys: Collection[Key] = ((0, 0, 0),)
    copied_bytes = 0

    def __init__(self) -> None:
        self.running = True
        self.progress = 0
        self.failed = False
        self.resume: ResumeTransfer

    def land(self, landed: LayerLanded) -> None:
        pass

    def missing(self) -> str:
        return ""

    def start(self) -> None:
        self.progress += 1

    def stop(self) -> None:
        self.failed = True

    def end_work(self, error: HeadraceError | None = None, *, late_write_s: float = 0.0) -> None:
        self.running, self.missing_keys = False, ()
        self.resume(error, late_write_s=late_write_s)


class HeldBroadcast(LocalBroadcast):
    """Its only copies are those of the test."""

    def __init__(self, held: HeldCopies) -> None:
        self._held = held

    def copies(
        self, reservation: Reservation, deadline: Deadline, resume: ResumeTransfer
    ) -> LocalCopies:
        self._held.resume = resume
        return self._held


class Stage:
    """One transfer of one layer, opened by one rank."""

    def __init__(self, copies: HeldCopies | None = None) -> None:
        self.timers = VirtualTimers()
        self.released: list[str] = []
        layout = make_layout(1, 1, heads=1)
        self.receiver = Receiver(
            ref=REF,
            layout=layout,
            tickets=NoTickets(),
            on_released=self.released.append,
            timers=self.timers,
            broadcast=None if copies is None else HeldBroadcast(copies),
        )
        self.transfer = self.reserve("x1", 1)
        self.ended_streams: list[HeadraceError] = []
        self.sent: list[handoff_pb2.HandoffResponse] = []
        self.peer = self.connect("prefill-0")
        self.handle(open=handoff_pb2.Open(transfer_id="x1"))

    def connect(self, worker_id: str) -> PrefillPeer:
        """The stream of a worker's only rank."""
        hello = handoff_pb2.Hello(
            worker_id=worker_id,
            incarnation="1",
            decode_worker_id=REF.worker_id,
            decode_incarnation=REF.incarnation,
            layout=layout_to_proto(make_layout(1, 1, heads=1)),
        )
        return self.receiver.connect(hello, self.sent.append, self.ended_streams.append)

    def reserve(self, transfer_id: str, block: int) -> IncomingTransfer:
        deadline = VirtualDeadline(self.timers.time() + 60.0, self.timers)
        return self.receiver.reserve(Reservation(transfer_id, (block,), 0, 4), deadline)

    def handle(self, **message: object) -> None:
        request = handoff_pb2.HandoffRequest(**message)  # type: ignore[arg-type]
        self.receiver.handle(self.peer, request)

    def land(self) -> None:
        done = handoff_pb2.LayerDone(
            transfer_id="x1", layer=0, start_token=0, end_token=4, payload_bytes=400
        )
        self.handle(layers_done=handoff_pb2.LayersDone(layers=[done]))

    def quiesce(self) -> None:
        self.handle(quiesced=handoff_pb2.Quiesced(transfer_id="x1"))

    def cancel(self) -> None:
        self.receiver.cancel("x1", "CANCELLED", "the test ends it")

    def advance(self, seconds: float) -> None:
        self.timers.advance_to(self.timers.time() + seconds)


@pytest.mark.parametrize("stream_ends", [False, True])
def test_a_transfer_completes_when_nothing_is_left_to_copy(stream_ends: bool) -> None:
    copies = HeldCopies()
    stage = Stage(copies)
    stage.land()
    assert stage.transfer.landed
    if stream_ends:
        stage.receiver.disconnect(stage.peer)
    assert stage.transfer.active
    copies.end_work()
    assert stage.transfer.state is TransferState.FREE
    assert stage.transfer.error is None
    assert stage.released == []


def test_a_stream_of_unknown_opens_ends() -> None:
    stage = Stage()
    for number in range(3_000):
        stage.handle(open=handoff_pb2.Open(transfer_id=f"unknown-{number}"))
    (error,) = stage.ended_streams
    assert "opened 1024 transfers that are not reserved" in error.detail
    assert len(stage.sent) == 1 + 1_024
    assert stage.transfer.active


def test_only_one_worker_fills_a_transfer() -> None:
    stage = Stage()
    stage.peer = stage.connect("prefill-1")
    stage.handle(open=handoff_pb2.Open(transfer_id="x1"))
    assert stage.sent[-1].cancel.reason == "PROTOCOL_VIOLATION"
    stage.land()
    assert stage.transfer.state is TransferState.OPEN


@pytest.mark.parametrize("landed, payload_bytes", [(False, 0), (True, 399)])
def test_a_commit_of_what_has_not_landed_fails_the_transfer(
    landed: bool, payload_bytes: int
) -> None:
    stage = Stage(HeldCopies())
    if landed:
        stage.land()
    stage.handle(commit=handoff_pb2.Commit(transfer_id="x1", payload_bytes=payload_bytes))
    assert isinstance(stage.transfer.error, ProtocolViolation)


def test_a_lost_stream_holds_the_blocks_for_the_quarantine() -> None:
    stage = Stage()
    stage.receiver.disconnect(stage.peer)
    stage.advance(WRITE_LEASE_S)
    assert stage.released == []
    stage.advance(2 * WRITE_QUARANTINE_S)
    assert stage.released == ["x1"]


def test_the_workers_with_a_lease_are_known_until_it_has_ended() -> None:
    stage = Stage()
    other = stage.connect("prefill-1").ref
    assert stage.receiver.lease_holders(time.monotonic()) == {stage.peer.ref, other}
    stage.receiver.disconnect(stage.peer)
    assert stage.receiver.lease_holders(time.monotonic()) == {stage.peer.ref, other}
    ended_s = time.monotonic() + WRITE_LEASE_S + 2 * WRITE_QUARANTINE_S
    assert stage.receiver.lease_holders(ended_s) == {other}


def test_blocks_are_released_as_soon_as_the_last_writer_has_quiesced() -> None:
    stage = Stage()
    stage.cancel()
    assert stage.released == []
    stage.quiesce()
    assert stage.released == ["x1"]


def test_blocks_are_not_released_while_a_copy_may_write() -> None:
    copies = HeldCopies()
    stage = Stage(copies)
    stage.cancel()
    assert copies.failed
    assert copies.progress == 0
    stage.quiesce()
    stage.advance(100.0)
    assert stage.released == []
    copies.end_work()
    assert stage.released == ["x1"]


def test_late_writes_of_a_copy_delay_the_release() -> None:
    copies = HeldCopies()
    stage = Stage(copies)
    stage.land()
    copies.end_work(TransferFailed("the work failed"), late_write_s=LATE_WRITE_S)
    stage.quiesce()
    stage.advance(0.9 * LATE_WRITE_S)
    assert stage.released == []
    stage.advance(0.5 * LATE_WRITE_S)
    assert stage.released == ["x1"]


def test_work_that_ends_after_close_releases_nothing() -> None:
    copies = HeldCopies()
    stage = Stage(copies)
    stage.cancel()
    stage.quiesce()
    stage.receiver.close()
    copies.end_work()
    assert stage.released == []


def test_a_rank_that_does_not_quiesce_loses_its_stream() -> None:
    stage = Stage()
    stage.cancel()
    stage.advance(29.0)
    assert stage.ended_streams == []
    stage.advance(2.0)
    assert "did not stop x1 in time" in stage.ended_streams[0].detail
    assert stage.released == []


@virtually
async def test_drain_waits_then_ends_everything() -> None:
    stage = Stage()
    stuck = stage.reserve("x2", 2)
    start_s = time.monotonic()
    drain = asyncio.create_task(stage.receiver.drain(20.0))
    await asyncio.sleep(10.0)
    stage.land()
    await stage.transfer.wait()
    await drain
    assert time.monotonic() - start_s == 20.0
    with pytest.raises(TransferFailed, match="shutting down"):
        await stuck.wait()
    assert stage.receiver.active_count == 0


def open_reserved(ticket: bytes, worker_id: str) -> tuple[str, list[str]]:
    """What a rank of a worker gets that opens a transfer reserved for prefill-0. And the refused parts.

    The receiver has no keys of routers, as a prefill worker.
    """
    refused: list[str] = []
    layout = make_layout(1, 1, heads=1)
    receiver = Receiver(
        ref=REF,
        layout=layout,
        tickets=RouterTickets(TicketKeys(), REF, layout, refused.append),
        on_released=lambda transfer_id: None,
        timers=VirtualTimers(),
    )
    reservation = Reservation("x1", (1,), 0, 4)
    sender = (WorkerRef("prefill-0", "1"), TICKET)
    receiver.reserve(reservation, Deadline.after(60.0), sender=sender)
    hello = handoff_pb2.Hello(
        worker_id=worker_id,
        incarnation="1",
        decode_worker_id=REF.worker_id,
        decode_incarnation=REF.incarnation,
        layout=layout_to_proto(layout),
    )
    sent: list[handoff_pb2.HandoffResponse] = []
    peer = receiver.connect(hello, sent.append, lambda error: None)
    opened = handoff_pb2.Open(transfer_id="x1", ticket=ticket)
    receiver.handle(peer, handoff_pb2.HandoffRequest(open=opened))
    (answer,) = sent
    return str(answer.WhichOneof("message")), refused


async def test_a_transfer_that_is_reserved_for_a_sender_accepts_its_very_ticket_only() -> None:
    assert open_reserved(TICKET, "prefill-0") == ("reservation", [])
    assert open_reserved(TICKET, "prefill-1") == ("cancel", ["transfer_id"])
    assert open_reserved(TICKET[:-1], "prefill-0") == ("cancel", ["signature"])
    assert open_reserved(b"", "prefill-0") == ("cancel", ["missing"])
