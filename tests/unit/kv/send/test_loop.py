"""The send loop, turn by turn, with a stream that records and writes that the test ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import TransferFailed, WorkerGone
from headrace_kv.copy_plan import Runs
from headrace_kv.layout import KvDescriptor, RankMemory, WorkerRef
from headrace_kv.leases import Clock, WriteLease
from headrace_kv.messages import Reservation, SendReport, TransferTarget
from headrace_kv.send.context import SenderContext
from headrace_kv.send.loop import SendLoop
from headrace_kv.send.mailbox import SenderInbox
from headrace_kv.send.stream import HandoffStream
from headrace_kv.shard_map import place_regions
from headrace_kv.transport.base import WriteResult
from tests.in_memory_transport import InMemoryTransport
from tests.unit.kv.send.support import BLOCK_TOKENS, LAYOUT, make_range, no_descriptor

DECODE = WorkerRef("decode-0", "1")
TOKENS = 2 * BLOCK_TOKENS
LEASE_S = 5.0
QUIET_S = 3.0
LANDED = WriteResult("in_memory", "direct", 1)
PLACED = place_regions(LAYOUT, 0, (4,))
MEMORY = RankMemory(0, "in_memory", "decode", 1 << 32, PLACED.arena_bytes, PLACED.regions)


class RecordingStream(HandoffStream):
    """Has a lease that lasts, and records what is sent."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lease = WriteLease(0.0, 0.0, 1e9)
        self.sent: list[str] = []

    def start(self) -> None:
        pass

    def _enqueue(self, item: handoff_pb2.HandoffRequest | handoff_pb2.LayerDone) -> None:
        if isinstance(item, handoff_pb2.LayerDone):
            self.sent.append("layer_done")
        else:
            self.sent.append(str(item.WhichOneof("message")))


class HeldTransport(InMemoryTransport):
    """Keeps its writes in flight."""

    pending_limit = 4

    def __init__(self, quiet_after_failure_s: float) -> None:
        super().__init__(quiet_after_failure_s=quiet_after_failure_s)
        self.in_flight: list[Future[WriteResult]] = []
        self.timeouts_s: list[float] = []

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        self.timeouts_s.append(timeout_s)
        self.in_flight.append(Future())
        return self.in_flight[-1]


class Rank:
    """A send loop with a clock that stands still unless `now_s` is set."""

    def __init__(self, waiting_ranges: int = 8, quiet_after_failure_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.transport = HeldTransport(quiet_after_failure_s)
        self.reports: list[SendReport] = []
        self.streams: list[RecordingStream] = []
        context = SenderContext(
            ref=WorkerRef("prefill-0", "1"),
            rank=0,
            layout=LAYOUT,
            memory=MEMORY,
            transport=self.transport,
            descriptors=no_descriptor,
            event_loop=asyncio.get_running_loop(),
            on_quiet=self.reports.append,
            clock=Clock(lambda: self.now_s, lambda: self.now_s),
        )
        self.inbox = SenderInbox(8, waiting_ranges, threading.Condition())
        self.loop = SendLoop(context, self.inbox, self._make_stream)

    def _make_stream(self, *arguments: Any) -> RecordingStream:
        self.streams.append(RecordingStream(*arguments))
        return self.streams[-1]

    @property
    def stream(self) -> RecordingStream:
        return self.streams[-1]

    def later(self, seconds: float) -> None:
        """The next turn comes after so many seconds."""
        self.now_s += seconds
        self.loop.turn()

    def lease(self, seconds: float) -> None:
        """From now on the stream's lease is one that ends after so many seconds, unless it is renewed."""
        self.stream.lease = WriteLease(self.now_s, self.now_s, seconds)

    def end(self, index: int, result: WriteResult | Exception = LANDED) -> None:
        """Ends one of the writes that were started, and takes a turn."""
        if isinstance(result, Exception):
            self.transport.in_flight[index].set_exception(result)
        else:
            self.transport.in_flight[index].set_result(result)
        self.loop.turn()

    def open(self, name: str, block_ids: tuple[int, ...] = (0, 1)) -> None:
        """Brings a transfer to its reservation."""
        target = TransferTarget(name, DECODE, "", 0, TOKENS, self.now_s + 10.0)
        first = not self.streams
        self.inbox.admit(name, self.loop.open, target)
        self.loop.turn()
        if first:
            descriptor = KvDescriptor(LAYOUT, (MEMORY,))
            self.loop.on_ready(self.stream, descriptor, handoff_pb2.Welcome())
        self.loop.on_reservation(self.stream, Reservation(name, block_ids, 0, TOKENS), 1)

    def push(self, name: str, layer: int = 0) -> bool:
        """Pushes a whole layer, and starts its write."""
        admitted = self.inbox.admit_range(name, self.loop.push, make_range(name, layer, TOKENS))
        for _ in range(3):
            self.loop.turn()
        return admitted


@pytest.mark.parametrize("result", [LANDED, ZeroDivisionError("a bug")])
async def test_a_stopped_transfer_is_quiet_in_the_turn_in_which_its_last_batch_ends(
    result: WriteResult | Exception,
) -> None:
    rank = Rank()
    rank.open("a")
    rank.push("a")
    rank.loop.stop("a", "CANCELLED", "the client left")
    rank.loop.turn()
    assert rank.stream.sent == ["open", "failed"]
    assert not rank.reports
    (future,) = rank.transport.in_flight
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    rank.loop.turn()
    assert rank.stream.sent == ["open", "failed", "quiesced"]
    assert [report.reason for report in rank.reports] == ["CANCELLED"]


async def test_no_batch_starts_after_the_deadline() -> None:
    rank = Rank()
    rank.open("a")
    rank.now_s += 11.0
    rank.loop.push(make_range("a", 0, TOKENS))
    # Planning takes one step, and the sweep of that turn would already fail the transfer.
    rank.loop._scheduler.run_step()
    rank.loop._scheduler.run_step()
    assert not rank.transport.in_flight
    assert [report.reason for report in rank.reports] == ["TRANSFER_TIMEOUT"]


async def test_nothing_is_sent_on_a_lost_stream() -> None:
    rank = Rank()
    rank.open("a")
    rank.push("a")
    lost = rank.stream
    rank.loop.on_lost(lost, WorkerGone("the test ends the stream"))
    assert not rank.reports
    rank.transport.in_flight[0].set_result(LANDED)
    rank.loop.turn()
    assert lost.sent == ["open"]
    assert [report.reason for report in rank.reports] == ["TRANSFER_FAILED"]


async def test_ranges_of_a_stopped_transfer_do_not_count_as_waiting() -> None:
    rank = Rank(waiting_ranges=1)
    rank.open("a")
    rank.open("b")
    rank.push("a")
    rank.loop.stop("a", "CANCELLED", "the client left")
    for layer in (0, 1):
        assert rank.push("a", layer)
    assert rank.push("b")
    assert len(rank.transport.in_flight) == 2


async def test_writes_that_land_out_of_order_are_acknowledged_in_order() -> None:
    rank = Rank()
    rank.open("a")
    for layer in range(2):
        rank.push("a", layer)
    rank.end(1)
    assert "layer_done" not in rank.stream.sent
    rank.end(0)
    assert rank.stream.sent == ["open", "layer_done", "layer_done", "commit"]


async def test_a_write_in_several_batches_has_landed_with_its_last() -> None:
    rank = Rank()
    rank.transport.entry_limit = 1
    rank.open("a", block_ids=(1, 0))
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
    assert (link.run_count, link.entry_count) == (4, 4)


async def test_a_failed_write_fails_its_transfer_and_not_its_neighbour() -> None:
    rank = Rank(quiet_after_failure_s=QUIET_S)
    rank.open("a")
    rank.open("b")
    for name in ("a", "b"):
        for layer in range(2):
            rank.push(name, layer)
    rank.end(0, TransferFailed("the test fails this write"))
    rank.later(2 * QUIET_S)
    # The other write can still land, so the source blocks stay held.
    assert not rank.reports
    for index in (1, 2, 3):
        rank.end(index)
    assert [(report.transfer_id, report.reason) for report in rank.reports] == [
        ("a", "TRANSFER_FAILED"),
        ("b", ""),
    ]


async def test_the_quiet_time_counts_from_the_last_failure() -> None:
    rank = Rank(quiet_after_failure_s=QUIET_S)
    rank.open("a")
    for layer in range(2):
        rank.push("a", layer)
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
    rank.inbox.close(rank.loop.stop_all)
    rank.later(LEASE_S)
    assert (rank.loop.over, rank.reports) == (False, [])
    rank.later(3.0)
    assert rank.loop.over
    # This write may never be reported as ended.
    assert not rank.reports
    assert rank.inbox.active_transfers() == {"a"}
    assert "did not end its writes in time" in caplog.text
