"""Staging: the parts that the conformance suite cannot observe."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.kv.v1 import scatter_pb2, scatter_pb2_grpc
from headrace_common.errors import TransferFailed
from headrace_common.limits import write_quiet_s
from headrace_kv.copy_plan import Int64Array, Runs
from headrace_kv.transport.base import Thresholds, WriteResult, session_of
from headrace_kv.transport.memory import HostMemory
from headrace_kv.transport.scatter import ScatterClient, StagingLimits
from headrace_kv.transport.staging import StagedTransport
from tests.in_memory_transport import Fault, FaultKind, FaultPlan, InMemoryTransport
from tests.rdma.harness import one_run
from tests.rdma.peers import Bytes


def filled(nbytes: int, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)


# Runs of less than 100 bytes are staged when there are more than a few.
THRESHOLDS = Thresholds(long_bytes=100, few_entries=3)


class PackedPair:
    """A staging sender and a receiver with one loan, over the in-memory transport."""

    def __init__(self) -> None:
        self.limits = StagingLimits(senders=1, slots=2, slot_bytes=1000, staging_slots=3)
        self.source, self.target = filled(20_000), np.zeros(20_000, np.uint8)
        self.inner = InMemoryTransport()
        self.receiver = StagedTransport(InMemoryTransport(), "127.0.0.1", THRESHOLDS, self.limits)
        self.receiver.register(self.target.ctypes.data, self.target.nbytes)
        self.session = self.receiver.session
        self.scatter_session = session_of("scatter", self.session) or ""
        self.sender = self.new_sender(self.inner)

    def new_sender(self, inner: InMemoryTransport) -> StagedTransport:
        sender = StagedTransport(inner, "127.0.0.1", THRESHOLDS, self.limits)
        sender.register(self.source.ctypes.data, self.source.nbytes)
        return sender

    def runs(self, count: int = 100, long: int = 0) -> Runs:
        """`count` runs of 40 to 64 bytes and `long` ones of 200, in mixed order, landing where they came from."""
        lengths = np.array([40 + index % 25 for index in range(count)] + [200] * long)
        offsets = np.cumsum(lengths + 3) - lengths
        order = np.random.default_rng(5).permutation(len(lengths))
        return Runs(
            (self.source.ctypes.data + offsets)[order],
            (self.target.ctypes.data + offsets)[order],
            lengths[order],
        )

    def check(self, runs: Runs) -> None:
        mask = np.zeros(len(self.source), bool)
        for start, length in zip(
            runs.destination_addresses.tolist(), runs.lengths.tolist(), strict=True
        ):
            mask[start - self.target.ctypes.data :][:length] = True
        assert np.array_equal(self.target, np.where(mask, self.source, 0))

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def packed() -> Iterator[PackedPair]:
    made = PackedPair()
    yield made
    made.close()


@pytest.mark.parametrize(("few", "long"), [(3, 0), (0, 20)])
def test_few_or_long_runs_pass_no_staging(
    packed: PackedPair, monkeypatch: pytest.MonkeyPatch, few: int, long: int
) -> None:
    monkeypatch.setattr(packed.sender, "submit_costly", None)
    runs = packed.runs(few, long)
    written = packed.sender.write(packed.session, runs, 5.0)
    assert written == WriteResult("in_memory", "direct", few + long)
    packed.check(runs)
    with pytest.raises(TypeError, match="not callable"):
        packed.sender.write("in_memory=a:1;landing=b:2/00", runs, 5.0)


def test_a_peer_without_a_scatter_server_is_written_to_directly(packed: PackedPair) -> None:
    plain = InMemoryTransport()
    plain.register(packed.target.ctypes.data, packed.target.nbytes)
    written = packed.sender.write(plain.session, packed.runs(), 5.0)
    packed.check(packed.runs())
    assert written.strategy == "direct"


def test_a_peer_that_does_not_scatter_fails_all_pending_writes(packed: PackedPair) -> None:
    """The first deadline ends the stream: every future is done, and nothing is copied afterwards."""
    packed.sender.write(packed.session, packed.runs(), 5.0)
    packed.target[:] = 0
    server = packed.receiver._server
    assert server is not None
    scatter, held = server._memory.scatter, threading.Event()

    class Held(HostMemory):
        def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
            held.wait(5.0)
            scatter(source, addresses, lengths)

    server._memory = Held()
    start_s = time.monotonic()
    first, second = (packed.sender.submit(packed.session, packed.runs(15), 0.3) for _ in range(2))
    for future in (first, second):
        with pytest.raises(TransferFailed, match="in time"):
            future.result(3.0)
    assert time.monotonic() - start_s < 4.0
    held.set()


def test_scattering_stays_within_registered_memory_and_time(packed: PackedPair) -> None:
    inside = packed.target.ctypes.data
    for address, seconds, reason in ((inside - 1, 5.0, "outside"), (inside, -60.0, "late")):
        client = client_once_lent(packed.scatter_session)
        where = one_run(0, address, 10)
        ends: queue.SimpleQueue[TransferFailed | None] = queue.SimpleQueue()
        client.submit(client.slots.acquire(0.0), where, time.monotonic() + seconds, ends.put)
        assert reason in str(ends.get(timeout=5.0))
        client.close(clean=False)
        end_quarantine(packed)
    assert not packed.target.any()


def test_a_wrong_token_lends_nothing(packed: PackedPair) -> None:
    with pytest.raises(TransferFailed, match="token is wrong"):
        ScatterClient(packed.scatter_session.partition("/")[0] + "/" + "00" * 16, 5.0)


def test_a_peer_that_lends_countless_slots_costs_no_memory() -> None:
    class Generous(scatter_pb2_grpc.ScatterServiceServicer):
        def Scatter(self, request_iterator: Any, context: grpc.ServicerContext) -> Any:
            landing = scatter_pb2.Landing(slot_bytes=1, slot_count=2**32 - 1)
            yield scatter_pb2.ScatterResponse(landing=landing)
            next(request_iterator, None)
            next(request_iterator, None)

    server = grpc.server(ThreadPoolExecutor(1))
    scatter_pb2_grpc.add_ScatterServiceServicer_to_server(Generous(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = ScatterClient(f"127.0.0.1:{port}/{'00' * 16}", 5.0)
    assert len(client.slots._free) == 64
    client.close(clean=True)
    server.stop(None).wait(5.0)


def test_an_aborted_loan_is_quarantined(packed: PackedPair) -> None:
    """Bytes of a vanished sender's last write must not land in a slot of another sender."""
    before_s = time.monotonic()
    ScatterClient(packed.scatter_session, 5.0).close(clean=False)
    with pytest.raises(TransferFailed, match="no slots"):
        ScatterClient(packed.scatter_session, 5.0)
    assert end_quarantine(packed) >= before_s + write_quiet_s()
    client_once_lent(packed.scatter_session).close(clean=True)
    client_once_lent(packed.scatter_session).close(clean=True)


def test_a_failed_write_aborts_the_stream(packed: PackedPair) -> None:
    packed.sender.write(packed.session, packed.runs(), 5.0)
    packed.sender.inner = InMemoryTransport(FaultPlan(every=Fault(FaultKind.FAIL)))
    with pytest.raises(TransferFailed):
        packed.sender.write(packed.session, packed.runs(), 5.0)
    assert all(client.broken for client in packed.sender._clients._clients.values())


def end_quarantine(packed: PackedPair) -> float:
    """Ends the quarantine of the loan, once the end of the stream has reached the server. Returns when it would end."""
    server = packed.receiver._server
    assert server is not None
    deadline_s = time.monotonic() + 5.0
    while math.inf in server._free_from_s:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    (free_from_s,) = server._free_from_s
    server._free_from_s = [0.0]
    return free_from_s


def client_once_lent(server: str) -> ScatterClient:
    """A client, once the end of the previous stream has reached the server."""
    deadline_s = time.monotonic() + 5.0
    while True:
        try:
            return ScatterClient(server, 5.0)
        except TransferFailed:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
