"""The loop: samples of an interval, requests between two intervals, and what was not observed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from headrace.inference.v1 import load_pb2
from headrace_common.errors import WorkerGone
from headrace_planner.observation import Interval
from headrace_planner.settings import PlannerSettings
from headrace_planner_service.config import PlannerConfig
from headrace_planner_service.observer import Observer, Reading
from headrace_planner_service.service import PlanningLoop
from headrace_planner_service.steering import (
    DecisionEntry,
    DecisionLog,
    Outcome,
    Steering,
    TargetBoard,
)
from tests.unit.planner.samples import sample


class FakeObserver:
    """Returns readings, or raises where there is none."""

    def __init__(self, readings: list[Reading | None]) -> None:
        self._readings: Iterator[Reading | None] = iter(readings)

    async def read(self) -> Reading:
        reading = next(self._readings)
        if reading is None:
            raise WorkerGone("decode-0 sends no status")
        return reading


def reading(count: int, queued: int = 0) -> Reading:
    totals = load_pb2.RequestTotals(request_count=count, prompt_tokens=10 * count)
    return Reading(sample(prefill=1, queued=queued), {"router": totals})


class RecordingSteering(Steering):
    """Keeps the intervals that it decided for."""

    intervals: tuple[Interval, ...] = ()

    def end_interval(self, interval: Interval) -> DecisionEntry:
        self.intervals += (interval,)
        return super().end_interval(interval)


class Bench:
    """A loop with two samples an interval."""

    def __init__(self, readings: list[Reading | None]) -> None:
        config = PlannerConfig.model_validate(
            {"model": "m", "interval_s": 0.02, "sample_interval_s": 0.01}
        )
        self.steering = RecordingSteering(
            PlannerSettings(), False, 1.0, TargetBoard("p"), DecisionLog(10), lambda: 0.0
        )
        self.decided: list[DecisionEntry] = []
        self.missed = 0
        observer = cast("Observer", FakeObserver(readings))
        self.loop = PlanningLoop(config, observer, self.steering, self.decided.append, self.miss)

    def miss(self) -> None:
        self.missed += 1


async def test_an_interval_has_the_requests_since_the_one_before() -> None:
    bench = Bench([reading(5), reading(6), reading(7), reading(9, queued=3)])
    assert (await bench.loop.run_interval()).outcome is Outcome.KEEP
    assert (await bench.loop.run_interval()).outcome is Outcome.ADVISED
    assert [entry.number for entry in bench.decided] == [1, 2]
    first, second = bench.steering.intervals
    assert first.requests is not None
    assert second.requests is not None
    # Before the first reading, it is not known what was answered.
    assert (first.requests.request_count, second.requests.request_count) == (1, 3)
    assert [one.queued_prompts for one in second.samples] == [0, 3]


async def test_half_of_the_samples_are_enough() -> None:
    bench = Bench([None, reading(1)])
    assert (await bench.loop.run_interval()).outcome is Outcome.KEEP
    assert bench.missed == 1
    assert bench.loop.fault == ""
    assert bench.loop.last_sample == sample(prefill=1)


async def test_without_samples_nothing_is_decided_and_the_cause_is_stated() -> None:
    bench = Bench([None, None])
    entry = await bench.loop.run_interval()
    assert entry.outcome is Outcome.INCOMPLETE
    assert "decode-0 sends no status" in entry.detail
    assert bench.loop.fault == "decode-0 sends no status"
    assert bench.loop.last_sample is None
