"""The send loop, turn by turn, with a stream that records and writes that the test ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import WorkerGone
from headrace_kv.handoff.clock import Clock
from headrace_kv.handoff.leases import WriteLease
from headrace_kv.handoff.messages import Reservation, SendReport, TransferTarget
from headrace_kv.layout.layout import KvDescriptor, RankMemory, WorkerRef
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.plan.regions import place_regions
from headrace_kv.send.context import SenderContext
from headrace_kv.send.loop import SendLoop
from headrace_kv.send.mailbox import SenderInbox
from headrace_kv.send.stream import HandoffStream
from headrace_kv.transport.base import WriteResult
from headrace_kv.transport.in_memory import InMemoryTransport
from tests.unit.kv.send.support import BLOCK_TOKENS, LAYOUT, make_range, no_descriptor

DECODE = WorkerRef("decode-0", "1")
TOKENS = 2 * BLOCK_TOKENS
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

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: list[Future[WriteResult]] = []

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        self.in_flight.append(Future())
        return self.in_flight[-1]


class Rank:
    """A send loop with a clock that stands still unless `now_s` is set."""

    def __init__(self, waiting_ranges: int = 8) -> None:
        self.now_s = 1000.0
        self.transport = HeldTransport()
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

    def open(self, name: str) -> None:
        """Brings a transfer to its reservation."""
        target = TransferTarget(name, DECODE, "", 0, TOKENS, self.now_s + 10.0)
        first = not self.streams
        self.inbox.admit(name, self.loop.open, target)
        self.loop.turn()
        if first:
            descriptor = KvDescriptor(LAYOUT, (MEMORY,))
            self.loop.on_ready(self.stream, descriptor, handoff_pb2.Welcome())
        self.loop.on_reservation(self.stream, Reservation(name, (0, 1), 0, TOKENS), 1)

    def push(self, name: str, layer: int = 0) -> bool:
        """Pushes a whole layer, and starts its write."""
        admitted = self.inbox.admit_range(name, self.loop.push, make_range(name, layer, TOKENS))
        for _ in range(3):
            self.loop.turn()
        return admitted


async def test_a_layer_is_acknowledged_when_it_has_landed_and_the_last_commits() -> None:
    rank = Rank()
    rank.open("a")
    for layer in range(2):
        rank.push("a", layer)
        assert rank.stream.sent.count("layer_done") == layer
        rank.transport.in_flight[-1].set_result(LANDED)
        rank.loop.turn()
    assert rank.stream.sent == ["open", "layer_done", "layer_done", "commit"]
    assert [report.reason for report in rank.reports] == [""]


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


async def test_ranges_beyond_a_complete_transfer_do_not_delay_its_commit() -> None:
    rank = Rank()
    rank.open("a")
    for layer in range(2):
        rank.push("a", layer)
    for future in rank.transport.in_flight:
        future.set_result(LANDED)
    rank.loop.push(make_range("a", 0, TOKENS))
    rank.loop.turn()
    assert rank.stream.sent[-1] == "commit"
    assert len(rank.reports) == 1
