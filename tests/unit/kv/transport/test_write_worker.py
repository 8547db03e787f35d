"""The thread that submits writes, with an engine that can be made to fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.base import WriteResult
from headrace_kv.transport.mooncake import write_worker
from headrace_kv.transport.mooncake.write_worker import WriteWorker


@dataclass
class FakeEngine:
    """Ends a batch when it is polled, unless the peer is `stuck` or `failing`. A `silent` peer blocks."""

    stuck: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    answer: threading.Event = field(default_factory=threading.Event)
    submitted: threading.Event = field(default_factory=threading.Event)
    batches: dict[int, str] = field(default_factory=dict)
    most_pending: int = 0

    def transfer_submit_write(
        self, session: str, source_address: int, destination_address: int, length: int
    ) -> int:
        if length == 0:
            if session in self.silent:
                self.answer.wait(10.0)
            return 1
        number = len(self.batches) + 10
        self.batches[number] = session
        self.submitted.set()
        pending = sum(1 for peer in self.batches.values() if peer)
        self.most_pending = max(self.most_pending, pending)
        return -1 if length == 666 else number

    @property
    def first_write_entry_count(self) -> int:
        """Entries of the first write, which is the longest."""
        return len(self.batches) - 8

    def transfer_check_status(self, batch: int) -> int:
        session = self.batches[batch]
        assert session, "an ended batch was polled again"
        if session in self.stuck:
            return 0
        self.batches[batch] = ""
        return -1 if session in self.failing else 1


class Rig:
    """A worker, and the engines that it has opened."""

    def __init__(self, stall_s: float = 0.3) -> None:
        self.engines: list[FakeEngine] = []
        self.next = FakeEngine()
        self.dropped = 0
        self.fault: ConfigError | None = None
        self.worker = WriteWorker(self.open, self.drop, "fake", stall_s=stall_s, rest_s=0.2)

    def open(self) -> FakeEngine:
        if self.fault is not None:
            raise self.fault
        self.engines.append(self.next)
        self.next = FakeEngine()
        return self.engines[-1]

    def drop(self) -> None:
        self.dropped += 1


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(*getattr(request, "param", ()))
    yield made
    made.worker.close()


def runs(count: int = 4, length: int = 100) -> Runs:
    starts = np.arange(count, dtype=np.int64) * length
    return Runs(starts, starts, np.full(count, length, np.int64))


def test_results_count_the_entries(rig: Rig) -> None:
    futures = [rig.worker.submit("peer", runs(1000), 5.0) for _ in range(3)]
    assert {future.result(5.0) for future in futures} == {WriteResult("fake", "direct", 1000)}
    assert rig.engines[0].most_pending <= 256
    assert rig.dropped == 0


def test_an_empty_write_ends_at_once_and_one_without_time_fails(rig: Rig) -> None:
    assert rig.worker.submit("peer", runs(0), 5.0).result(0.0).entry_count == 0
    with pytest.raises(TransferFailed, match="no time"):
        rig.worker.submit("peer", runs(), 0.0).result(0.0)


@pytest.mark.parametrize("how", ["failing", "stuck", "refused"])
def test_a_failure_costs_the_engine_and_all_writes_to_that_peer(rig: Rig, how: str) -> None:
    if how != "refused":
        getattr(rig.next, how).add("bad")
    good = rig.worker.submit("good", runs(), 5.0)
    length = 666 if how == "refused" else 100
    bad = [rig.worker.submit("bad", runs(length=length), 5.0) for _ in range(3)]
    for future in bad:
        with pytest.raises(TransferFailed):
            future.result(5.0)
    assert good.result(5.0).entry_count == 4
    with pytest.raises(TransferFailed, match="nothing was written"):
        rig.worker.submit("bad", runs(), 5.0).result(5.0)
    assert rig.worker.submit("good", runs(), 5.0).result(5.0).entry_count == 4
    time.sleep(0.25)
    assert rig.worker.submit("bad", runs(), 5.0).result(5.0).entry_count == 4
    assert len(rig.engines) == 2
    assert rig.dropped == 1


def test_a_stalled_write_fails_after_its_deadline(rig: Rig) -> None:
    rig.next.stuck.add("bad")
    start_s = time.monotonic()
    with pytest.raises(TransferFailed, match="has not moved"):
        rig.worker.submit("bad", runs(), 0.1).result(5.0)
    assert time.monotonic() - start_s < 3.0


@pytest.mark.parametrize("rig", [(60.0,)], indirect=True)
def test_a_late_write_that_makes_progress_fails_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long this process stands still, the peer is late but not stalled.
    monkeypatch.setattr(write_worker, "_LATE_STALL_S", 60.0)
    monkeypatch.setattr(write_worker, "_LATE_MAX_S", 60.0)
    engine = rig.next
    engine.stuck.add("slow")
    late = rig.worker.submit("slow", runs(600), 0.5)
    other = rig.worker.submit("slow", runs(), 30.0)
    time.sleep(0.6)
    assert not late.done()
    engine.stuck.clear()
    with pytest.raises(TransferFailed, match="longer than its time"):
        late.result(20.0)
    assert other.result(20.0).entry_count == 4
    assert rig.worker.submit("slow", runs(), 30.0).result(20.0).entry_count == 4
    assert rig.dropped == 0
    assert 0 < engine.first_write_entry_count < 600


@pytest.mark.parametrize("rig", [(60.0,)], indirect=True)
def test_a_late_write_that_makes_slow_progress_costs_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long this process stands still, the peer is late but not stalled.
    monkeypatch.setattr(write_worker, "_LATE_STALL_S", 60.0)
    monkeypatch.setattr(write_worker, "_LATE_MAX_S", 0.2)
    rig.next.stuck.add("slow")
    with pytest.raises(TransferFailed, match="much longer than its time"):
        rig.worker.submit("slow", runs(), 0.1).result(20.0)
    assert rig.dropped == 1


def test_two_stuck_peers_fail_together(rig: Rig) -> None:
    """The engine that is dropped for the first peer carried the writes of the other."""
    rig.next.stuck |= {"bad", "worse"}
    futures = [rig.worker.submit(peer, runs(), t) for peer, t in (("bad", 0.1), ("worse", 4.0))]
    for future in futures:
        with pytest.raises(TransferFailed):
            future.result(2.0)


def test_a_peer_that_never_answers_does_not_delay_others(rig: Rig) -> None:
    engine = rig.next
    engine.silent.add("bad")
    bad = rig.worker.submit("bad", runs(), 5.0)
    assert rig.worker.submit("good", runs(), 5.0).result(0.25).entry_count == 4
    with pytest.raises(TransferFailed, match="does not answer"):
        bad.result(2.0)
    assert rig.dropped == 0
    time.sleep(0.25)
    engine.answer.set()
    assert rig.worker.submit("bad", runs(), 5.0).result(2.0).entry_count == 4


def test_errors_show_the_peers_host_and_no_port(rig: Rig) -> None:
    session = "10.0.0.7:15123"
    rig.next.failing.add(session)
    for _ in range(2):
        # The second write fails because the first has.
        with pytest.raises(TransferFailed) as raised:
            rig.worker.submit(session, runs(), 5.0).result(5.0)
        assert "10.0.0.7" in raised.value.detail
        assert "15123" not in f"{raised.value.detail} {raised.value.metadata}"


def test_an_engine_that_does_not_start_fails_the_write(rig: Rig) -> None:
    rig.fault = ConfigError("no device")
    with pytest.raises(TransferFailed, match="no device"):
        rig.worker.submit("peer", runs(), 5.0).result(5.0)


def test_closing_fails_pending_writes(rig: Rig) -> None:
    rig.next.stuck.add("bad")
    engine = rig.next
    futures = [rig.worker.submit("bad", runs(), 5.0) for _ in range(3)]
    assert engine.submitted.wait(5.0)
    rig.worker.close()
    for future in futures:
        with pytest.raises(TransferFailed, match="closed"):
            future.result(0.0)
