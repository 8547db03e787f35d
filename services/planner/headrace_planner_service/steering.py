"""Decides at the end of each interval, publishes the target in force, and keeps the last decisions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headrace_common.errors import ConfigError, Draining, NotFound
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import MetricStore
from headrace_planner.observation import Interval, ScalingDecision, WorkerCounts
from headrace_planner.planner import PlannerState, plan, record_interval
from headrace_planner.settings import PlannerSettings


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
        line = f"{current} -> {target}" if self.decision.is_change else str(current)
        sentences = [reason.sentence for reason in self.decision.reasons]
        return " ".join([f"{line} ({self.outcome})", *filter(None, [self.detail]), *sentences])


class DecisionLog:
    """Keeps the last decisions, at most `count`."""

    def __init__(self, count: int) -> None:
        self._entries: deque[DecisionEntry] = deque(maxlen=count)
        self._number = 0

    @property
    def newest(self) -> DecisionEntry | None:
        """The last decision."""
        return self._entries[-1] if self._entries else None

    def add(
        self,
        start_unix_s: float,
        duration_s: float,
        decision: ScalingDecision,
        outcome: Outcome,
        detail: str = "",
    ) -> DecisionEntry:
        """Keeps a decision with the next number, and returns it."""
        self._number += 1
        entry = DecisionEntry(self._number, start_unix_s, duration_s, decision, outcome, detail)
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


class PlannerMetrics:
    """Counts decisions as they are made."""

    def __init__(self, store: MetricStore) -> None:
        self._current = store.gauge(schema.METRIC_PLANNER_CURRENT)
        self._target = store.gauge(schema.METRIC_PLANNER_TARGET)
        self._decisions = store.counter(schema.METRIC_PLANNER_DECISIONS)
        self._missed = store.counter(schema.METRIC_PLANNER_MISSED_SAMPLES)

    def count_miss(self) -> None:
        """Counts a sample that could not be taken."""
        self._missed.add(1)

    def count_decision(self, entry: DecisionEntry) -> None:
        """Counts a decision, and shows its numbers."""
        self._decisions.add(1, entry.outcome)
        decision = entry.decision
        if entry.outcome is not Outcome.INCOMPLETE:
            self._current.replace(_by_role(decision.current))
            self._target.replace(_by_role(decision.target))


def _by_role(counts: WorkerCounts) -> dict[str, float]:
    return {role.value: counts.of(role) for role in counts.roles}


@dataclass(frozen=True, slots=True)
class Target:
    """Numbers of workers that should run, decided from `current`. `number` is that of the decision."""

    id: str
    number: int
    current: WorkerCounts
    counts: WorkerCounts
    decided_unix_s: float


class TargetBoard:
    """Owns the target in force. `planner` is the id of this start of the planner: a later start has other targets.

    One event loop owns it.
    """

    def __init__(self, planner: str) -> None:
        self._planner = planner
        self.target: Target | None = None
        """The target in force, None before the first."""
        self.pending = False
        """Whether the target waits for its acknowledgement."""
        self._closed = False
        self._changed = asyncio.Event()

    def publish(
        self, number: int, current: WorkerCounts, counts: WorkerCounts, decided_unix_s: float
    ) -> Target:
        """Replaces the target by that of a decision."""
        self.target = Target(f"{self._planner}-{number}", number, current, counts, decided_unix_s)
        self.pending = True
        self._wake()
        return self.target

    def settle(self) -> None:
        """The target waits for no acknowledgement any more."""
        self.pending = False

    def require(self, target_id: str) -> Target:
        """The target in force. Raises NotFound when it has another id."""
        if self.target is None or self.target.id != target_id:
            in_force = self.target.id if self.target is not None else "none"
            raise NotFound(
                f"{target_id} is not the target in force, which is {in_force}: watch the targets again",
                metadata={"target_id": target_id, "in_force": in_force},
            )
        return self.target

    async def wait_other(self, seen_id: str) -> Target:
        """The target in force, once its id differs from `seen_id`. Raises Draining after `close`."""
        while True:
            if self._closed:
                raise Draining("the planner shuts down")
            if self.target is not None and self.target.id != seen_id:
                return self.target
            await self._changed.wait()

    def close(self) -> None:
        """Ends every wait."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(eq=False, slots=True)
class Steering:
    """Owns the planner's state, its decisions and its target. `publishes`: whether decisions become targets.

    While a target is carried out, nothing is decided. A target that is not acknowledged in time expires.
    """

    settings: PlannerSettings
    publishes: bool
    change_timeout_s: float
    board: TargetBoard
    decisions: DecisionLog
    clock: Callable[[], float]
    """Returns monotonic seconds."""
    published_s: float = field(default=0.0, init=False)
    _state: PlannerState = field(default_factory=PlannerState, init=False)

    def end_interval(self, interval: Interval) -> DecisionEntry:
        """The decision at the end of an interval."""
        self._expire()
        if self.board.pending and self.board.target is not None:
            self._state = record_interval(self.settings, interval, self._state)
            kept = ScalingDecision(interval.counts, self.board.target.counts, ())
            return self._add(
                interval,
                kept,
                Outcome.CHANGING,
                f"Target {self.board.target.id} is carried out.",
            )
        decision, self._state = plan(self.settings, interval, self._state)
        if interval.is_changing:
            return self._add(interval, decision, Outcome.CHANGING, "Workers join or leave.")
        if not decision.is_change:
            return self._add(interval, decision, Outcome.KEEP)
        if not self.publishes:
            return self._add(interval, decision, Outcome.ADVISED)
        entry = self._add(interval, decision, Outcome.PUBLISHED)
        self.published_s = self.clock()
        decided_unix_s = interval.start_unix_s + interval.duration_s
        self.board.publish(entry.number, decision.current, decision.target, decided_unix_s)
        return entry

    def skip_interval(self, start_unix_s: float, duration_s: float, fault: str) -> DecisionEntry:
        """An interval without a complete observation: nothing is decided."""
        self._expire()
        newest = self.decisions.newest
        counts = newest.decision.current if newest is not None else WorkerCounts(0, 0)
        unchanged = ScalingDecision(counts, counts, ())
        return self.decisions.add(start_unix_s, duration_s, unchanged, Outcome.INCOMPLETE, fault)

    def acknowledge(self, target_id: str, failure: str = "") -> Target:
        """The target in force was carried out, or failed. Repeats change nothing.

        Raises NotFound for another target.
        """
        self.require_publishing()
        target = self.board.require(target_id)
        if self.board.pending:
            self.board.settle()
            outcome = Outcome.FAILED if failure else Outcome.APPLIED
            self.decisions.set_outcome(target.number, outcome, failure)
        return target

    def require_publishing(self) -> None:
        """Raises ConfigError where the planner only advises."""
        if not self.publishes:
            raise ConfigError("the planner only advises: start it with mode publish")

    def _expire(self) -> None:
        target, age_s = self.board.target, self.clock() - self.published_s
        if self.board.pending and target is not None and age_s > self.change_timeout_s:
            self.board.settle()
            detail = f"No acknowledgement came within {self.change_timeout_s:g} s."
            self.decisions.set_outcome(target.number, Outcome.EXPIRED, detail)

    def _add(
        self, interval: Interval, decision: ScalingDecision, outcome: Outcome, detail: str = ""
    ) -> DecisionEntry:
        start_unix_s, duration_s = interval.start_unix_s, interval.duration_s
        return self.decisions.add(start_unix_s, duration_s, decision, outcome, detail)
