"""Each decision is counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_planner.observation import PlannedRole, Reason, ScalingDecision, WorkerCounts
from headrace_planner_service.config import PlannerConfig
from headrace_planner_service.steering import DecisionEntry, Outcome, PlannerMetrics

REASON = Reason(PlannedRole.DECODE, "load above threshold", 3, {"load": 0.95}, "It is full.")
DECISION = ScalingDecision(WorkerCounts(1, 2), WorkerCounts(1, 3), (REASON,))


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    config = PlannerConfig.model_validate({"model": "m"})
    telemetry = init_telemetry("planner", "planner-0", config)
    yield telemetry
    telemetry.shutdown()


def entry(outcome: Outcome) -> DecisionEntry:
    return DecisionEntry(1, 100.0, 30.0, DECISION, outcome)


def values(telemetry: Telemetry) -> dict[str, object]:
    return {one.name: dict(one.points) for one in telemetry.metrics.store.collect()}


def test_a_decision_sets_the_numbers_and_counts_its_outcome(telemetry: Telemetry) -> None:
    metrics = PlannerMetrics(telemetry)
    metrics.count_decision(entry(Outcome.PUBLISHED))
    # What was not observed replaces no number.
    unknown = ScalingDecision(WorkerCounts(0, 0), WorkerCounts(0, 0), ())
    metrics.count_decision(DecisionEntry(2, 130.0, 30.0, unknown, Outcome.INCOMPLETE))
    metrics.count_miss()
    found = values(telemetry)
    assert found[schema.METRIC_PLANNER_CURRENT] == {("prefill",): 1, ("decode",): 2}
    assert found[schema.METRIC_PLANNER_TARGET] == {("prefill",): 1, ("decode",): 3}
    assert found[schema.METRIC_PLANNER_DECISIONS] == {("published",): 1, ("incomplete",): 1}
    assert found[schema.METRIC_PLANNER_MISSED_SAMPLES] == {(): 1}
