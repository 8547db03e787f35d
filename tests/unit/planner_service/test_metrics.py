"""Each decision is counted."""

from __future__ import annotations

from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import MetricStore
from headrace_planner.observation import ScalingDecision, WorkerCounts
from headrace_planner_service.steering import DecisionEntry, Outcome, PlannerMetrics

DECISION = ScalingDecision(WorkerCounts(1, 2), WorkerCounts(1, 3), ())


def entry(outcome: Outcome) -> DecisionEntry:
    return DecisionEntry(1, 100.0, 30.0, DECISION, outcome)


def test_a_decision_sets_the_numbers_and_counts_its_outcome() -> None:
    store = MetricStore()
    metrics = PlannerMetrics(store)
    metrics.count_decision(entry(Outcome.PUBLISHED))
    # What was not observed replaces no number.
    unknown = ScalingDecision(WorkerCounts(0, 0), WorkerCounts(0, 0), ())
    metrics.count_decision(DecisionEntry(2, 130.0, 30.0, unknown, Outcome.INCOMPLETE))
    metrics.count_miss()
    found = {one.name: dict(one.points) for one in store.collect()}
    assert found[schema.METRIC_PLANNER_CURRENT] == {("prefill",): 1, ("decode",): 2}
    assert found[schema.METRIC_PLANNER_TARGET] == {("prefill",): 1, ("decode",): 3}
    assert found[schema.METRIC_PLANNER_DECISIONS] == {("published",): 1, ("incomplete",): 1}
    assert found[schema.METRIC_PLANNER_MISSED_SAMPLES] == {(): 1}
