"""The thread that submits writes, with an engine that can be made to fail."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.transport import write_worker
from headrace_kv.transport.base import WriteResult
from headrace_kv.transport.write_worker import WriteWorker

STALL_S = 60.0
REST_S = 30.0
STUCK_PEERS = (("bad", 40.0), ("worse", 90.0))


@dataclass
class FakeEngine:
    """Ends a batch when it is polled, unless the peer is `stuck` or `failing`. A `silent` peer blocks."""

    stuck: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    answer: threading.Event = field(default_factory=threading.Event)
    submitted: threading.Event = field(default_factory=threading.Event)
    batches: dict[int, str] = field(default_factory=dict)
    polls: Counter[int] = field(default_factory=Counter)
    """By batch."""
    most_pending: int = 0

    def transfer_submit_write(
        self, session: str, source_address: int, destination_address: int, length: int
    ) -> int:
        if length == 0:
            if session in self.silent:
                self.answer.wait(60.0)
            return 1
        number = len(self.batches) + 10
        self.batches[number] = session
        self.submitted.set()
        pending = sum(1 for peer in self.batches.values() if peer)
        self.most_pending = max(self.most_pending, pending)
        return -1 if length == 666 else number

    def await_entry(self, session: str) -> None:
        """Returns once the worker waits for entries to a stuck peer: it looks at the first one once in a round.

        The rounds that have accepted and submitted the peer's writes are then over, with the clock of that time.
        """
        end_s = time.monotonic() + 20.0
        first: int | None = None
        polls_min = 0
        while first is None or self.polls[first] < polls_min:
            assert time.monotonic() < end_s, f"no entry to {session}"
            time.sleep(0.001)
            if first is None:
                batches = sorted(self.batches.copy().items())
                first = next((number for number, peer in batches if peer == session), None)
                polls_min = self.polls[first] + 3 if first is not None else 0

    @property
    def first_write_entry_count(self) -> int:
        """Entries of the first write, which is the longest."""
        return len(self.batches) - 8

    def transfer_check_status(self, batch: int) -> int:
        session = self.batches[batch]
        assert session, "an ended batch was polled again"
        self.polls[batch] += 1
        if session in self.stuck:
            return 0
        self.batches[batch] = ""
        return -1 if session in self.failing else 1


class JumpClock:
    """A clock that runs as the real one, and jumps on request."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    @staticmethod
    def sleep(duration_s: float) -> None:
        time.sleep(duration_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> JumpClock:
    """The clock of the worker and its writes. A deadline passes on request, not when this process stands still."""
    clock = JumpClock()
    monkeypatch.setattr(write_worker, "time", clock)

    return clock


class Rig:
    """A worker, and the engines that it has opened."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.next = FakeEngine()
        self.dropped = 0
        self.fault: ConfigError | None = None
        self.worker = WriteWorker(self.open, self.drop, "fake", stall_s=STALL_S, rest_s=REST_S)

    def open(self) -> FakeEngine:
        if self.fault is not None:
            raise self.fault
        self.engines.append(self.next)
        self.next = FakeEngine()
        return self.engines[-1]

    def drop(self) -> None:
        self.dropped += 1


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.worker.close()


def runs(count: int = 4, length: int = 100) -> Runs:
    starts = np.arange(count, dtype=np.int64) * length
    return Runs(starts, starts, np.full(count, length, np.int64))


def submit_stuck(
    rig: Rig, session: str, timeout_s: float, *, entry_count: int = 4
) -> Future[WriteResult]:
    """Submits a write to a peer that makes no progress, and returns once an entry is in flight."""
    engine = rig.engines[-1] if rig.engines else rig.next
    engine.stuck.add(session)
    future = rig.worker.submit(session, runs(entry_count), timeout_s)
    engine.await_entry(session)
    return future


def test_results_count_the_entries(rig: Rig) -> None:
    futures = [rig.worker.submit("peer", runs(1000), 20.0) for _ in range(3)]
    assert {future.result(20.0) for future in futures} == {WriteResult("fake", "direct", 1000)}
    assert rig.engines[0].most_pending <= 256
    assert rig.dropped == 0


@pytest.mark.parametrize("how", ["failing", "stuck", "refused"])
def test_a_failure_costs_the_engine_and_all_writes_to_that_peer(
    rig: Rig, clock: JumpClock, how: str
) -> None:
    engine = rig.next
    if how != "refused":
        getattr(engine, how).add("bad")
    good = rig.worker.submit("good", runs(), 90.0)
    length = 666 if how == "refused" else 100
    bad = [rig.worker.submit("bad", runs(length=length), 90.0) for _ in range(3)]
    assert good.result(20.0).entry_count == 4
    if how == "stuck":
        engine.await_entry("bad")
        clock.ahead_s += STALL_S
    for future in bad:
        with pytest.raises(TransferFailed):
            future.result(20.0)
    with pytest.raises(TransferFailed, match="nothing was written"):
        rig.worker.submit("bad", runs(), 90.0).result(20.0)
    assert rig.worker.submit("good", runs(), 90.0).result(20.0).entry_count == 4
    clock.ahead_s += REST_S
    assert rig.worker.submit("bad", runs(), 90.0).result(20.0).entry_count == 4
    assert len(rig.engines) == 2
    assert rig.dropped == 1


def test_a_late_write_that_makes_progress_fails_alone(
    rig: Rig, clock: JumpClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_worker, "_LATE_STALL_S", 60.0)
    monkeypatch.setattr(write_worker, "_LATE_MAX_S", 60.0)
    engine = rig.next
    late = submit_stuck(rig, "slow", 30.0, entry_count=600)
    other = rig.worker.submit("slow", runs(), 90.0)
    clock.ahead_s += 30.0
    # More rounds of the worker.
    engine.await_entry("slow")
    assert not late.done()
    engine.stuck.clear()
    with pytest.raises(TransferFailed, match="longer than its time"):
        late.result(20.0)
    assert other.result(20.0).entry_count == 4
    assert rig.worker.submit("slow", runs(), 90.0).result(20.0).entry_count == 4
    assert rig.dropped == 0
    assert 0 < engine.first_write_entry_count < 600


@pytest.mark.parametrize(
    ("late_stall_s", "detail"), [(60.0, "much longer than its time"), (1.0, "stands still")]
)
def test_a_late_write_that_makes_slow_or_no_progress_costs_the_engine(
    rig: Rig, clock: JumpClock, monkeypatch: pytest.MonkeyPatch, late_stall_s: float, detail: str
) -> None:
    monkeypatch.setattr(write_worker, "_LATE_STALL_S", late_stall_s)
    late = submit_stuck(rig, "slow", 30.0)
    clock.ahead_s += 32.0
    with pytest.raises(TransferFailed, match=detail):
        late.result(20.0)
    assert rig.dropped == 1


def test_writes_that_end_while_the_engine_is_given_up_succeed(
    rig: Rig, clock: JumpClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = submit_stuck(rig, "slow", 900.0)
    engine = rig.engines[0]
    check = engine.transfer_check_status

    def check_status(batch: int) -> int:
        if engine.batches[batch] == "bad":
            engine.stuck.clear()
        return check(batch)

    monkeypatch.setattr(engine, "transfer_check_status", check_status)
    engine.failing.add("bad")
    with pytest.raises(TransferFailed):
        rig.worker.submit("bad", runs(), 90.0).result(20.0)
    assert other.result(20.0).entry_count == 4
    assert rig.dropped == 1


def test_two_stuck_peers_fail_together(rig: Rig, clock: JumpClock) -> None:
    """The engine that is dropped for the first peer carried the writes of the other."""
    futures = [submit_stuck(rig, peer, timeout_s) for peer, timeout_s in STUCK_PEERS]
    clock.ahead_s += STALL_S
    for future in futures:
        with pytest.raises(TransferFailed):
            future.result(20.0)
    assert rig.dropped == 1


def test_a_peer_that_never_answers_does_not_delay_others(rig: Rig, clock: JumpClock) -> None:
    engine = rig.next
    engine.silent.add("bad")
    bad = rig.worker.submit("bad", runs(), 90.0)
    assert rig.worker.submit("good", runs(), 90.0).result(20.0).entry_count == 4
    clock.ahead_s += STALL_S
    with pytest.raises(TransferFailed, match="does not answer"):
        bad.result(20.0)
    assert rig.dropped == 0
    clock.ahead_s += REST_S
    engine.answer.set()
    assert rig.worker.submit("bad", runs(), 90.0).result(20.0).entry_count == 4


def test_an_engine_that_does_not_start_fails_the_write(rig: Rig) -> None:
    rig.fault = ConfigError("no device")
    with pytest.raises(TransferFailed, match="no device"):
        rig.worker.submit("peer", runs(), 90.0).result(20.0)


def test_closing_fails_pending_writes(rig: Rig) -> None:
    rig.next.stuck.add("bad")
    engine = rig.next
    futures = [rig.worker.submit("bad", runs(), 20.0) for _ in range(3)]
    assert engine.submitted.wait(20.0)
    rig.worker.close()
    for future in futures:
        with pytest.raises(TransferFailed, match="closed"):
            future.result(0.0)
