"""A rank's sender, turn by turn, with streams that record, writes that the test ends, and a device of its own."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import Any

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    Draining,
    DuplicateTransfer,
    QueueFull,
    TransferFailed,
    WorkerGone,
)
from headrace_common.telemetry.layer_stamps import unpack_writes
from headrace_kv.checksum import DigestTerms
from headrace_kv.copy_plan import Runs
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef
from headrace_kv.leases import Clock, WriteLease
from headrace_kv.messages import LayerRange, Reservation, SendReport, TransferTarget
from headrace_kv.send.sender import RankSender
from headrace_kv.send.stream import (
    CancelReceived,
    HandoffStream,
    ReservationReceived,
    SenderContext,
    SenderLimits,
    StreamLost,
    StreamReady,
)
from headrace_kv.shard_map import place_regions
from headrace_kv.transport.base import WriteResult
from headrace_kv.transport.memory import PASSED
from tests.in_memory_transport import InMemoryTransport
from tests.manual_thread import ManualThread
from tests.sent_layers import sent_layers

BLOCK_TOKENS = 4
TOKENS = 2 * BLOCK_TOKENS
LAYOUT = KvLayout.attention(
    model="m:1",
    dtype="float32",
    layer_count=2,
    kv_head_count=1,
    tensor_parallel_size=1,
    block_tokens=BLOCK_TOKENS,
    parts={"kv": 4},
)
WRITE_BYTES = 4 * TOKENS
DECODE = WorkerRef("decode-0", "1")
DEADLINE_S = 10.0
LEASE_S = 5.0
QUIET_S = 3.0
WRITE_TIMEOUT_S = 2.0
LANDED = WriteResult("in_memory", "direct", 1)


def memory_of(session: str) -> RankMemory:
    placed = place_regions(LAYOUT, 0, (4,))
    return RankMemory(0, "in_memory", session, 1 << 32, placed.arena_bytes, placed.regions)


async def no_descriptor(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
    raise AssertionError("a stream that is not started asks for no descriptor")


class RecordingStream(HandoffStream):
    """Has a lease that lasts, and records what is sent."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lease = WriteLease(0.0, 0.0, 1e9)
        self.sent: list[str] = []
        self.layers: list[tuple[str, int]] = []

    def start(self) -> None:
        pass

    def send(self, item: handoff_pb2.HandoffRequest | handoff_pb2.LayerDone) -> None:
        if isinstance(item, handoff_pb2.LayerDone):
            self.sent.append("layer_done")
            self.layers.append((item.transfer_id, item.layer))
            assert not item.HasField("digest")
        else:
            self.sent.append(str(item.WhichOneof("message")))


class HeldTransport(InMemoryTransport):
    """Keeps its writes in flight."""

    pending_limit = 4

    def __init__(self, quiet_after_failure_s: float) -> None:
        super().__init__(quiet_after_failure_s=quiet_after_failure_s)
        self.in_flight: list[Future[WriteResult]] = []
        self.sessions: list[str] = []
        self.timeouts_s: list[float] = []
        self.refuses = False

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        if self.refuses:
            raise ZeroDivisionError("a bug")
        self.sessions.append(session)
        self.timeouts_s.append(timeout_s)
        self.in_flight.append(Future())
        return self.in_flight[-1]


class DeviceMark:
    """A mark that the test passes, or fails."""

    state: bool | RuntimeError = False

    def query(self) -> bool:
        if isinstance(self.state, RuntimeError):
            raise self.state
        return self.state


class Rank:
    """A sender with a clock that stands still unless `now_s` is set."""

    def __init__(self, limits: SenderLimits | None = None, quiet_after_failure_s: float = 0.0):
        self.now_s = 1000.0
        self.transport = HeldTransport(quiet_after_failure_s)
        self.reports: list[SendReport] = []
        self.streams: dict[WorkerRef, RecordingStream] = {}
        context = SenderContext(
            ref=WorkerRef("prefill-0", "1"),
            rank=0,
            layout=LAYOUT,
            memory=memory_of("prefill"),
            host_memory=memory_of("prefill"),
            transport=self.transport,
            descriptors=no_descriptor,
            event_loop=asyncio.get_running_loop(),
            on_quiet=self.reports.append,
            clock=Clock(lambda: self.now_s, lambda: self.now_s),
        )
        thread = ManualThread()
        limits = limits or SenderLimits(8, 8, WRITE_TIMEOUT_S)
        self.sender = RankSender(
            context, limits=limits, thread=thread, make_stream=self._make_stream
        )
        self.loop = thread.loop
        self.turn = thread.loop.turn

    def _make_stream(self, context: Any, decode: WorkerRef, *arguments: Any) -> RecordingStream:
        return self.streams.setdefault(decode, RecordingStream(context, decode, *arguments))

    @property
    def stream(self) -> RecordingStream:
        return self.streams[DECODE]

    @property
    def reasons(self) -> list[tuple[str, str]]:
        return [(report.transfer_id, report.reason) for report in self.reports]

    def later(self, seconds: float) -> None:
        """The next turn comes after so many seconds."""
        self.now_s += seconds
        self.turn()

    def lease(self, seconds: float) -> None:
        """From now on the stream's lease is one that ends after so many seconds, unless it is renewed."""
        self.stream.lease = WriteLease(self.now_s, self.now_s, seconds)

    def end(self, index: int, result: WriteResult | Exception = LANDED) -> None:
        """Ends one of the writes that were started, and takes a turn."""
        if isinstance(result, Exception):
            self.transport.in_flight[index].set_exception(result)
        else:
            self.transport.in_flight[index].set_result(result)
        self.turn()

    def connect(self, name: str, decode: WorkerRef = DECODE, hidden: bool = False) -> None:
        """Starts a transfer. Its stream is ready if it was before."""
        deadline_s = self.now_s + DEADLINE_S
        self.sender.open(TransferTarget(name, decode, "", 0, TOKENS, deadline_s, hidden))
        self.turn()

    def ready(self, decode: WorkerRef = DECODE) -> None:
        """The stream to a decode worker is ready. Its memory is reached by a session of the worker's name."""
        descriptor = KvDescriptor(LAYOUT, (memory_of(decode.worker_id),))
        self.sender.post(StreamReady(self.streams[decode], descriptor, DigestTerms(0.0)))
        self.turn()

    def reserve(self, name: str, *block_ids: int, decode: WorkerRef = DECODE) -> None:
        """Decode answers with its blocks, 0 and 1 where none are given."""
        reservation = Reservation(name, block_ids or (0, 1), 0, TOKENS)
        self.sender.post(ReservationReceived(self.streams[decode], reservation, 1))
        self.turn()

    def open(
        self, name: str, *block_ids: int, decode: WorkerRef = DECODE, hidden: bool = False
    ) -> None:
        """Brings a transfer to its reservation."""
        first = decode not in self.streams
        self.connect(name, decode, hidden)
        if first:
            self.ready(decode)
        self.reserve(name, *block_ids, decode=decode)

    def push(self, name: str, *layers: int, turn: bool = True) -> None:
        """Pushes whole layers that the device has written, layer 0 where none is named."""
        for layer in layers or (0,):
            self.sender.push(layer_range(name, layer))
        if turn:
            self.turn()

    def push_marked(self, name: str, layer: int = 0) -> DeviceMark:
        """Pushes a layer that the device has not written yet."""
        mark = DeviceMark()
        self.sender.push(layer_range(name, layer), mark)
        self.turn()
        return mark

    def written(self, *marks: DeviceMark) -> None:
        """The device has passed these marks."""
        for mark in marks:
            mark.state = True
        self.turn()


def layer_range(name: str, layer: int, *, in_host_memory: bool = False) -> LayerRange:
    return LayerRange(name, layer, 0, TOKENS, (0, 1), time.monotonic_ns(), in_host_memory)


@pytest.mark.parametrize("result", [LANDED, ZeroDivisionError("a bug")])
async def test_a_stopped_transfer_is_quiet_in_the_turn_in_which_its_last_batch_ends(
    result: WriteResult | Exception,
) -> None:
    rank = Rank()
    rank.open("a")
    rank.push("a")
    rank.sender.stop("a", "CANCELLED", "the client left")
    rank.turn()
    assert rank.stream.sent == ["open", "failed"]
    assert not rank.reports
    # What the kernel's timer bounds.
    assert rank.stream.late_writes.in_flight == 1
    rank.end(0, result)
    assert rank.stream.late_writes.in_flight == 0
    assert rank.stream.sent == ["open", "failed", "quiesced"]
    (report,) = rank.reports
    assert report.reason == "CANCELLED"
    # The write is reported as one that had not landed.
    assert [write.finished for write in unpack_writes(report.links[0].layers)] == [False]


async def test_a_transfer_that_is_stopped_before_its_open_sends_nothing() -> None:
    rank = Rank()
    rank.connect("a")
    rank.sender.stop("a", "CANCELLED", "the client left")
    rank.turn()
    assert (rank.stream.sent, rank.reasons) == ([], [("a", "CANCELLED")])


async def test_a_lease_counts_from_the_hello_not_from_its_answer() -> None:
    rank = Rank()
    rank.connect("a")
    hello_s = rank.now_s
    rank.now_s += 2.0
    welcome = handoff_pb2.Welcome(
        lease_ttl=duration_from_seconds(LEASE_S), quarantine=duration_from_seconds(QUIET_S)
    )
    rank.stream._grant_lease(hello_s, welcome)
    assert rank.stream.lease.end_s == hello_s + LEASE_S


async def test_a_reservation_counts_only_from_the_worker_of_the_transfer() -> None:
    other = WorkerRef("decode-1", "1")
    rank = Rank()
    rank.open("b", decode=other)
    rank.connect("a")
    rank.ready()
    rank.reserve("a", decode=other)
    rank.push("a")
    assert not rank.transport.in_flight
    rank.reserve("a")
    assert len(rank.transport.in_flight) == 1


async def test_no_batch_starts_after_the_deadline() -> None:
    rank = Rank()
    rank.open("a")
    rank.now_s += DEADLINE_S
    rank.push("a")
    assert not rank.transport.in_flight
    assert rank.reasons == [("a", "TRANSFER_TIMEOUT")]


async def test_nothing_is_sent_on_a_lost_stream() -> None:
    rank = Rank()
    rank.open("a")
    rank.push("a")
    lost = rank.stream
    rank.sender.post(StreamLost(lost, WorkerGone("the test ends the stream")))
    rank.turn()
    assert not rank.reports
    rank.end(0)
    assert lost.sent == ["open"]
    assert rank.reasons == [("a", "TRANSFER_FAILED")]


async def test_transfers_and_waiting_ranges_are_bounded() -> None:
    rank = Rank(SenderLimits(transfers=2, waiting_ranges=1))
    rank.open("a")
    rank.open("b")
    with pytest.raises(QueueFull):
        rank.connect("c")
    with pytest.raises(DuplicateTransfer):
        rank.connect("a")
    rank.push("a")
    rank.sender.stop("a", "CANCELLED", "the client left")
    # The ranges of a stopped transfer do not count.
    for layer in (0, 1):
        rank.push("a", layer)
    rank.push("b", 0)
    rank.push("b", 1)
    assert len(rank.transport.in_flight) == 3
    rank.end(0)
    rank.open("c")
    rank.push("c", 0, 1)
    rank.sender.close()
    with pytest.raises(Draining):
        rank.connect("d")
    assert rank.reasons == [("a", "CANCELLED"), ("c", "QUEUE_FULL")]


async def test_writes_that_land_out_of_order_are_acknowledged_in_order() -> None:
    rank = Rank()
    rank.open("a")
    rank.push("a", 0, 1)
    rank.end(1)
    assert "layer_done" not in rank.stream.sent
    rank.end(0)
    assert rank.stream.sent == ["open", "layer_done", "layer_done", "commit"]


async def test_a_write_in_several_batches_has_landed_with_its_last() -> None:
    rank = Rank()
    rank.transport.entry_limit = 1
    rank.open("a", 1, 0)
    rank.push("a")
    rank.end(1, WriteResult("mooncake/tcp", "gather_scatter", 1))
    assert "layer_done" not in rank.stream.sent
    rank.end(0)
    assert rank.stream.sent == ["open", "layer_done"]
    rank.push("a", 1)
    rank.end(2)
    rank.end(3)
    (report,) = rank.reports
    (link,) = report.links
    assert (link.transport, link.strategy) == ("mooncake/tcp+in_memory", "gather_scatter+direct")
    assert (link.run_count, link.entry_count, report.payload_bytes) == (4, 4, 2 * WRITE_BYTES)


async def test_the_batches_of_a_stopped_transfer_are_dropped_and_delay_no_other() -> None:
    rank = Rank()
    rank.transport.entry_limit, rank.transport.pending_limit = 1, 1
    rank.open("a", 1, 0)
    rank.open("b")
    rank.push("a")
    rank.sender.stop("a", "CANCELLED", "the client left")
    rank.push("b")
    rank.end(0)
    assert len(rank.transport.in_flight) == 2
    rank.end(1)
    assert rank.stream.layers[0] == ("b", 0)


async def test_a_turn_starts_every_write_with_room_and_workers_take_turns() -> None:
    rank = Rank()
    rank.transport.pending_limit = 2
    names = ("slow", "x", "y")
    for name in names:
        rank.open(name, decode=WorkerRef(name, "1"))
        rank.open(f"{name}2", decode=WorkerRef(name, "1"))
    for name in names:
        rank.push(name, 0, 1, turn=False)
    rank.turn()
    assert rank.transport.sessions == [*names, *names]
    # Both windows of x and y have room again. The one of the slow worker delays none of them.
    for name in names:
        rank.push(f"{name}2")
    for index in (1, 2):
        rank.end(index)
    assert rank.transport.sessions[6:] == ["x", "y"]
    rank.end(0)
    assert rank.transport.sessions[8:] == ["slow"]


async def test_transfers_to_one_worker_take_turns() -> None:
    rank = Rank()
    rank.open("a")
    rank.open("b")
    rank.push("a", 0, 1, turn=False)
    rank.push("b", 0, 1, turn=False)
    rank.turn()
    for index in range(4):
        rank.end(index)
    assert rank.stream.layers == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


async def test_a_window_has_no_more_bytes_than_one_write() -> None:
    rank = Rank()
    rank.transport.byte_limit = 2 * WRITE_BYTES - 1
    rank.open("a")
    rank.push("a", 0, 1)
    assert len(rank.transport.in_flight) == 1
    rank.end(0)
    assert len(rank.transport.in_flight) == 2


async def test_a_failed_write_fails_its_transfer_and_not_its_neighbour() -> None:
    rank = Rank(quiet_after_failure_s=QUIET_S)
    rank.open("a")
    rank.open("b")
    for name in ("a", "b"):
        rank.push(name, 0, 1)
    rank.end(0, TransferFailed("the test fails this write"))
    rank.later(2 * QUIET_S)
    # The other write can still land, so the source blocks stay held.
    assert not rank.reports
    for index in (1, 2, 3):
        rank.end(index)
    assert rank.reasons == [("a", "TRANSFER_FAILED"), ("b", "")]


async def test_a_transport_that_raises_fails_the_transfer() -> None:
    rank = Rank()
    rank.open("a")
    rank.open("b")
    rank.transport.refuses = True
    rank.push("a")
    rank.transport.refuses = False
    rank.push("b", 0, 1)
    assert rank.reasons == [("a", "INTERNAL")]
    assert len(rank.transport.in_flight) == 2


async def test_the_quiet_time_counts_from_the_last_failure() -> None:
    rank = Rank(quiet_after_failure_s=QUIET_S)
    rank.open("a")
    rank.push("a", 0, 1)
    for index in range(2):
        rank.later(0.7 * QUIET_S)
        rank.end(index, TransferFailed("the test fails this write"))
    rank.later(0.9 * QUIET_S)
    assert not rank.reports
    rank.later(0.2 * QUIET_S)
    assert len(rank.reports) == 1


async def test_no_write_starts_or_goes_on_without_a_lease_and_quiet_waits_for_the_others() -> None:
    rank = Rank()
    rank.open("a")
    rank.lease(LEASE_S)
    rank.push("a", 0)
    rank.later(LEASE_S)
    rank.push("a", 1)
    # The transport abandons a write that never ends with the lease.
    assert rank.transport.timeouts_s == [LEASE_S]
    assert rank.stream.sent == ["open", "failed"]
    assert not rank.reports
    rank.end(0)
    (report,) = rank.reports
    assert report.reason == "TRANSFER_FAILED"
    assert "lease" in report.detail


async def test_closing_waits_for_writes_until_they_are_overdue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = Rank()
    rank.open("a")
    rank.lease(LEASE_S)
    rank.push("a")
    rank.sender.close()
    rank.later(LEASE_S)
    assert (rank.loop.over, rank.reports) == (False, [])
    rank.later(3.0)
    assert rank.loop.over
    # This write may never be reported as ended.
    assert not rank.reports
    assert rank.sender.active_transfers() == {"a"}
    assert "writes did not end in time" in caplog.text


async def test_timeout_errors_name_the_awaited_event() -> None:
    rank = Rank()
    rank.connect("a")
    rank.later(DEADLINE_S)
    rank.connect("b")
    rank.ready()
    rank.later(DEADLINE_S)
    for name, layers in (("c", []), ("d", [1]), ("e", [0, 1])):
        rank.open(name, hidden=True)
        for layer in layers:
            rank.push(name, layer)
            rank.end(-1)
        rank.later(DEADLINE_S)
    assert [report.detail.partition("while waiting for ")[2] for report in rank.reports] == [
        "the handshake with decode-0@1",
        "the reservation of decode-0@1",
        "layers 0, 1 (2 of 2)",
        "layers 0 (1 of 2)",
        "the hidden state",
    ]


async def test_a_transfer_is_committed_when_layers_and_hidden_state_are_sent() -> None:
    rank = Rank()
    rank.connect("a", hidden=True)
    rank.ready()
    rank.sender.push_hidden_state("a", lambda: b"state")
    rank.turn()
    assert rank.stream.sent == ["open"]
    rank.reserve("a")
    assert rank.stream.sent == ["open", "hidden_state"]
    rank.push("a", 0, 1)
    rank.end(0)
    rank.end(1)
    assert rank.stream.sent[2:] == ["layer_done", "layer_done", "commit"]
    assert [sent.times.layer for sent in sent_layers(rank.reports[:1])] == [0, 1]


async def test_open_is_sent_again_until_it_is_answered() -> None:
    rank = Rank()
    rank.connect("a")
    rank.later(5.0)
    rank.ready()
    rank.later(0.9)
    assert rank.stream.sent == ["open"]
    rank.later(0.1)
    assert rank.stream.sent == ["open", "open"]
    rank.reserve("a")
    rank.reserve("a", 3, 2)
    rank.later(1.0)
    assert rank.stream.sent == ["open", "open"]
    rank.open("b", 0)
    assert rank.reasons == [("b", "PROTOCOL_VIOLATION")]


async def test_a_worker_that_answers_no_open_frees_the_slot_by_its_name() -> None:
    rank = Rank()
    # Half a second more each, until the next sweep. Then a worker that answers again may take longer again.
    for name, wait_s, answers in (
        *(("a", 8.0, False), ("b", 1.0, False), ("c", 1.0, False), ("d", 1.0, True)),
        *(("e", 2.0, False), ("f", 1.0, False)),
    ):
        rank.connect(name)
        rank.ready()
        rank.later(wait_s - 0.1)
        if answers:
            rank.reserve(name)
        assert name not in dict(rank.reasons)
        rank.later(0.6)
        assert (name in dict(rank.reasons)) is not answers
    reports = [(one.reason, one.detail) for one in rank.reports]
    for number, wait_s in ((0, 8), (1, 1)):
        assert reports[number] == (
            "TRANSFER_TIMEOUT",
            f"the reservation of {DECODE} did not come within {wait_s} s of Open",
        )


async def test_a_worker_that_is_only_slow_after_a_silent_open_is_found_within_a_minute() -> None:
    rank = Rank()
    rank.connect("a")
    rank.ready()
    rank.later(8.5)
    assert dict(rank.reasons) == {"a": "TRANSFER_TIMEOUT"}
    rank.later(60.0)
    # One has the longest wait then, and the others a second, until it is answered.
    for name in ("b", "c"):
        rank.connect(name)
    rank.later(1.5)
    assert dict(rank.reasons).keys() == {"a", "c"}
    rank.later(1.5)
    rank.reserve("b")
    for name in ("d", "e"):
        rank.connect(name)
    rank.later(1.5)
    # A refusal is an answer.
    refusal = handoff_pb2.Cancel(transfer_id="d", reason="NOT_FOUND")
    rank.sender.post(CancelReceived(rank.stream, refusal))
    rank.reserve("e")
    assert dict(rank.reasons).keys() == {"a", "c", "d"}
    rank.connect("f")
    rank.later(7.4)
    assert "f" not in dict(rank.reasons)


# A device, which writes what was pushed some time later.


async def test_ranges_are_sent_in_order_as_the_device_writes_them() -> None:
    rank = Rank()
    # Undone within the loop, which has a clock of its own there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: int(rank.now_s * 1e9))
        for name in ("a", "b"):
            rank.open(name)
        marks = [rank.push_marked("a", layer) for layer in range(2)]
        rank.sender.finish("a")
        # Blocks of main memory wait for no kernel. They keep their place behind those that do.
        rank.sender.push(layer_range("b", 0, in_host_memory=True), PASSED)
        marks.append(rank.push_marked("b", 1))
        rank.later(0.5)
        assert len(rank.transport.in_flight) == 1
        assert 0.0 < rank.loop.wait_s() <= 0.001
        rank.written(marks[1])
        assert len(rank.transport.in_flight) == 1
        rank.written(marks[0])
        rank.now_s += 0.5
        rank.written(marks[2])
        for index in range(4):
            rank.end(index)
        assert rank.reasons == [("a", ""), ("b", "")]
        # Ready is the time at which the device had written it, not that of the push.
        assert [sent.times.ready_ns for sent in sent_layers(rank.reports[1:2])] == [0, 1e9]
        assert rank.loop.wait_s() > 0.001


async def test_a_hidden_state_is_read_once_the_device_has_copied_it() -> None:
    rank = Rank()
    rank.open("a", hidden=True)
    copied: list[bytes] = []
    layer, copy = rank.push_marked("a"), DeviceMark()
    rank.sender.push_hidden_state("a", lambda: copied[0], copy)
    rank.written(layer)
    copied.append(b"row")
    assert rank.stream.sent == ["open"]
    rank.written(copy)
    assert rank.stream.sent == ["open", "hidden_state"]


async def test_a_hidden_state_that_cannot_be_read_fails_its_transfer_only() -> None:
    rank = Rank()
    rank.open("a", hidden=True)
    rank.open("b")
    copy = DeviceMark()
    rank.sender.push_hidden_state("a", lambda: bytes(1 // 0), copy)
    rank.written(copy, rank.push_marked("b"))
    assert rank.reasons == [("a", "INTERNAL")]
    assert len(rank.transport.in_flight) == 1


async def test_a_stop_comes_before_waiting_ranges_and_drops_them() -> None:
    rank = Rank(SenderLimits(waiting_ranges=2))
    rank.open("a")
    rank.open("b")
    marks = [rank.push_marked("a", layer) for layer in range(2)]
    rank.sender.stop("a", "CANCELLED", "enough")
    rank.turn()
    assert rank.reasons == [("a", "CANCELLED")]
    # The ranges of the id's next transfer are not mixed with them.
    rank.open("a")
    rank.written(*marks)
    assert not rank.transport.in_flight
    rank.push("b", 0, 1)
    assert len(rank.transport.in_flight) == 2


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_device_that_is_late_or_fails_fails_the_transfer(breaks: bool) -> None:
    rank = Rank()
    rank.open("a")
    rank.open("b")
    mark = rank.push_marked("a", 1)
    rank.later(0.9 * WRITE_TIMEOUT_S)
    assert not rank.reports
    other = rank.push_marked("b")
    if breaks:
        mark.state = RuntimeError("an illegal access")
    rank.later(0.01 if breaks else 0.1 * WRITE_TIMEOUT_S)
    assert rank.reasons == [("a", "TRANSFER_FAILED")]
    expected = "layer 1 was written: an illegal access" if breaks else "not write layer 1 in time"
    assert expected in rank.reports[0].detail
    rank.written(other)
    assert len(rank.transport.in_flight) == 1


async def test_closing_drops_what_the_device_has_not_written() -> None:
    rank = Rank()
    rank.open("a")
    rank.push_marked("a")
    rank.sender.close()
    rank.turn()
    assert (rank.loop.over, rank.reasons) == (True, [("a", "DRAINING")])
