"""Decisions at the end of intervals, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import ConfigError, NotFound
from headrace_planner.observation import WorkerCounts
from headrace_planner.settings import LoadSettings, PlannerSettings
from headrace_planner_service.steering import (
    DecisionEntry,
    DecisionLog,
    Outcome,
    Steering,
    TargetBoard,
)
from tests.unit.planner.samples import interval, sample

QUEUED = interval(sample(prefill=1, queued=5))
TIMEOUT_S = 60.0


@dataclass
class Bench:
    """A planner of which a test moves the clock."""

    publishes: bool = True
    now_s: float = 0.0
    board: TargetBoard = field(default_factory=lambda: TargetBoard("p"))

    def __post_init__(self) -> None:
        settings = PlannerSettings(load=LoadSettings(trend_intervals=0))
        self.decisions = DecisionLog(4)
        self.steering = Steering(
            settings, self.publishes, TIMEOUT_S, self.board, self.decisions, lambda: self.now_s
        )

    def entry(self, number: int) -> DecisionEntry:
        (found,) = [one for one in self.decisions.page(0, 100) if one.number == number]
        return found


def test_a_planner_that_advises_publishes_nothing() -> None:
    bench = Bench(publishes=False)
    entry = bench.steering.end_interval(QUEUED)
    assert entry.outcome is Outcome.ADVISED
    assert entry.decision.target == WorkerCounts(2, 2)
    assert bench.board.target is None
    with pytest.raises(ConfigError, match="mode publish"):
        bench.steering.acknowledge("p-1")
    # Nothing is under way, so the next interval has a decision of its own.
    assert bench.steering.end_interval(QUEUED).outcome is Outcome.ADVISED


def test_nothing_is_decided_until_a_target_is_acknowledged() -> None:
    bench = Bench()
    first = bench.steering.end_interval(QUEUED)
    assert first.outcome is Outcome.PUBLISHED
    target = bench.board.target
    assert target is not None
    assert (target.id, target.current) == ("p-1", WorkerCounts(1, 2))
    assert target.counts == WorkerCounts(2, 2)
    second = bench.steering.end_interval(QUEUED)
    assert second.outcome is Outcome.CHANGING
    assert "p-1" in second.detail
    bench.steering.acknowledge("p-1")
    assert bench.entry(1).outcome is Outcome.APPLIED
    third = bench.steering.end_interval(interval(sample(prefill=2, queued=9)))
    assert third.outcome is Outcome.PUBLISHED
    assert bench.board.target is not None
    assert bench.board.target.counts == WorkerCounts(3, 2)


def test_a_failure_is_kept_and_the_planner_decides_again() -> None:
    bench = Bench()
    bench.steering.end_interval(QUEUED)
    bench.steering.acknowledge("p-1", "no device is free")
    assert bench.entry(1).outcome is Outcome.FAILED
    assert bench.entry(1).detail == "no device is free"
    bench.steering.acknowledge("p-1")
    assert bench.entry(1).outcome is Outcome.FAILED
    assert bench.steering.end_interval(QUEUED).outcome is Outcome.PUBLISHED


def test_a_target_without_acknowledgement_expires() -> None:
    bench = Bench()
    bench.steering.end_interval(QUEUED)
    bench.now_s = TIMEOUT_S
    assert bench.steering.end_interval(QUEUED).outcome is Outcome.CHANGING
    bench.now_s = TIMEOUT_S + 1
    assert bench.steering.end_interval(QUEUED).outcome is Outcome.PUBLISHED
    assert bench.entry(1).outcome is Outcome.EXPIRED
    with pytest.raises(NotFound, match="p-3"):
        bench.steering.acknowledge("p-1")


STEPS = st.one_of(
    st.tuples(st.just("interval"), st.integers(1, 4), st.integers(0, 12)),
    st.tuples(st.just("skip"), st.just(0), st.just(0)),
    st.tuples(st.just("acknowledge"), st.booleans(), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 100), st.just(0)),
)


@given(st.lists(STEPS, max_size=40))
def test_at_most_one_target_is_under_way_and_none_exceeds_the_budget(
    steps: list[tuple[str, int, int]],
) -> None:
    bench = Bench()
    published: list[str] = []
    for kind, first, second in steps:
        board = bench.board
        was_pending, age_s = board.pending, bench.now_s - bench.steering.published_s
        if kind == "interval":
            entry = bench.steering.end_interval(interval(sample(prefill=first, queued=second)))
            if entry.outcome is Outcome.PUBLISHED:
                assert not was_pending or age_s > TIMEOUT_S
                assert board.target is not None
                assert board.target.counts == entry.decision.target != entry.decision.current
                assert entry.decision.target.prefill + entry.decision.target.decode <= 8
                published.append(board.target.id)
        elif kind == "skip":
            bench.steering.skip_interval(0.0, 1.0, "silent")
        elif kind == "wait":
            bench.now_s += first
        elif board.target is not None:
            bench.steering.acknowledge(board.target.id, "failed" if first else "")
            assert not board.pending
    assert len(set(published)) == len(published)
    assert len(bench.decisions.page(0, 100)) <= 4
