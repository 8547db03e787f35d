"""The planner's metrics, and the span of each decision."""

from __future__ import annotations

from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry
from headrace_planner.observation import PlannedRole, WorkerCounts
from headrace_planner_service.decisions import DecisionEntry, Outcome

_NS_PER_S = 1_000_000_000


class PlannerMetrics:
    """Counts decisions as they are made."""

    def __init__(self, telemetry: Telemetry) -> None:
        store = telemetry.metrics.store
        self._telemetry = telemetry
        self._current = store.gauge(schema.METRIC_PLANNER_CURRENT, schema.ATTRIBUTE_MEMBER_ROLE)
        self._target = store.gauge(schema.METRIC_PLANNER_TARGET, schema.ATTRIBUTE_MEMBER_ROLE)
        self._decisions = store.counter(
            schema.METRIC_PLANNER_DECISIONS, schema.ATTRIBUTE_PLANNER_OUTCOME
        )
        self._missed = store.counter(schema.METRIC_PLANNER_MISSED_SAMPLES)

    def count_miss(self) -> None:
        """Counts a sample that could not be taken."""
        self._missed.add(1)

    def count_decision(self, entry: DecisionEntry) -> None:
        """Counts a decision, shows its numbers, and records its span."""
        self._decisions.add(1, entry.outcome)
        decision = entry.decision
        if entry.outcome is not Outcome.INCOMPLETE:
            self._current.replace(_by_role(decision.current))
            self._target.replace(_by_role(decision.target))
        start_unix_ns = round(entry.start_unix_s * _NS_PER_S)
        self._telemetry.record_span(
            schema.SPAN_PLANNER_DECISION,
            None,
            start_unix_ns,
            start_unix_ns + round(entry.duration_s * _NS_PER_S),
            {
                schema.ATTRIBUTE_PLANNER_OUTCOME: entry.outcome.value,
                schema.ATTRIBUTE_PLANNER_PREFILL: decision.current.prefill,
                schema.ATTRIBUTE_PLANNER_DECODE: decision.current.decode,
                schema.ATTRIBUTE_PLANNER_PREFILL_TARGET: decision.target.prefill,
                schema.ATTRIBUTE_PLANNER_DECODE_TARGET: decision.target.decode,
                schema.ATTRIBUTE_PLANNER_REASONS: [reason.sentence for reason in decision.reasons],
            },
        )


def _by_role(counts: WorkerCounts) -> dict[str, float]:
    return {role.value: counts.of(role) for role in PlannedRole}
