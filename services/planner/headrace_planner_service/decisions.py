"""The last decisions of a planner, what became of them, and their metrics and spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry
from headrace_planner.observation import PlannedRole, ScalingDecision, WorkerCounts


class Outcome(StrEnum):
    """What became of a decision. planner.proto describes the values."""

    KEEP = "keep"
    CHANGING = "changing"
    INCOMPLETE = "incomplete"
    ADVISED = "advised"
    PUBLISHED = "published"
    APPLIED = "applied"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class DecisionEntry:
    """One decision at the end of an interval. `number` counts from 1."""

    number: int
    start_unix_s: float
    duration_s: float
    decision: ScalingDecision
    outcome: Outcome
    detail: str = ""

    @property
    def text(self) -> str:
        """The decision with its reasons, for logs."""
        current, target = self.decision.current, self.decision.target
        line = f"{current.prefill} P, {current.decode} D"
        if self.decision.is_change:
            line += f" -> {target.prefill} P, {target.decode} D"
        sentences = [reason.sentence for reason in self.decision.reasons]
        return " ".join([f"{line} ({self.outcome})", *filter(None, [self.detail]), *sentences])


class DecisionLog:
    """Keeps the last decisions, at most `count`."""

    def __init__(self, count: int) -> None:
        self._entries: deque[DecisionEntry] = deque(maxlen=count)
        self._number = 0

    @property
    def next_number(self) -> int:
        """The number of the next decision."""
        return self._number + 1

    @property
    def newest(self) -> DecisionEntry | None:
        """The last decision."""
        return self._entries[-1] if self._entries else None

    def add(self, entry: DecisionEntry) -> DecisionEntry:
        """Keeps a decision with the next number, and returns it."""
        self._number = entry.number
        self._entries.append(entry)
        return entry

    def set_outcome(self, number: int, outcome: Outcome, detail: str = "") -> DecisionEntry | None:
        """Records what became of a decision. Returns it, or None where it is no longer kept."""
        for index, entry in enumerate(self._entries):
            if entry.number == number:
                self._entries[index] = replace(entry, outcome=outcome, detail=detail)
                return self._entries[index]
        return None

    def page(self, before: int, count: int) -> Sequence[DecisionEntry]:
        """Up to `count` decisions with smaller numbers than `before`, newest first. 0 means from the newest."""
        found = [entry for entry in reversed(self._entries) if not before or entry.number < before]
        return found[:count]


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
