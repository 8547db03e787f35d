"""Decides at the end of each interval, publishes the target in force, and follows what becomes of each decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headrace_common.errors import ConfigError, Draining, NotFound
from headrace_planner.observation import Interval, ScalingDecision, WorkerCounts
from headrace_planner.planner import PlannerState, plan, record_interval
from headrace_planner.settings import PlannerSettings, WorkerProfile
from headrace_planner_service.decisions import DecisionEntry, DecisionLog, Outcome


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
        self._target: Target | None = None
        self._pending = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def target(self) -> Target | None:
        """The target in force, None before the first."""
        return self._target

    @property
    def pending(self) -> bool:
        """Whether the target waits for its acknowledgement."""
        return self._pending

    def publish(
        self, number: int, current: WorkerCounts, counts: WorkerCounts, decided_unix_s: float
    ) -> Target:
        """Replaces the target by that of a decision."""
        self._target = Target(f"{self._planner}-{number}", number, current, counts, decided_unix_s)
        self._pending = True
        self._wake()
        return self._target

    def settle(self) -> None:
        """The target waits for no acknowledgement any more."""
        self._pending = False

    def require(self, target_id: str) -> Target:
        """The target in force. Raises NotFound when it has another id."""
        if self._target is None or self._target.id != target_id:
            in_force = self._target.id if self._target is not None else "none"
            raise NotFound(
                f"{target_id} is not the target in force, which is {in_force}: watch the targets again",
                metadata={"target_id": target_id, "in_force": in_force},
            )
        return self._target

    async def wait_other(self, seen_id: str) -> Target:
        """The target in force, once its id differs from `seen_id`. Raises Draining after `close`."""
        while True:
            if self._closed:
                raise Draining("the planner shuts down")
            if self._target is not None and self._target.id != seen_id:
                return self._target
            await self._changed.wait()

    def close(self) -> None:
        """Ends every wait."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class Rules:
    """What decisions are made by. `publishes`: whether another process carries them out."""

    settings: PlannerSettings
    profile: WorkerProfile | None
    publishes: bool
    change_timeout_s: float


class Steering:
    """Owns the planner's state, its decisions and its target.

    While a target is carried out, nothing is decided. A target that is not acknowledged in time expires.
    """

    def __init__(
        self,
        rules: Rules,
        board: TargetBoard,
        decisions: DecisionLog,
        clock: Callable[[], float],
    ) -> None:
        """`clock` returns monotonic seconds."""
        self._rules = rules
        self._clock = clock
        self._state = PlannerState()
        self.published_s = 0.0
        self.board = board
        self.decisions = decisions

    @property
    def publishes(self) -> bool:
        """Whether decisions become targets."""
        return self._rules.publishes

    def end_interval(self, interval: Interval) -> DecisionEntry:
        """The decision at the end of an interval."""
        self._expire()
        if self.board.pending and self.board.target is not None:
            self._state = record_interval(self._rules.settings, interval, self._state)
            kept = ScalingDecision(interval.counts, self.board.target.counts, ())
            return self._add(
                interval,
                kept,
                Outcome.CHANGING,
                f"Target {self.board.target.id} is carried out.",
            )
        decision, self._state = plan(
            self._rules.settings, self._rules.profile, interval, self._state
        )
        if interval.is_changing:
            return self._add(interval, decision, Outcome.CHANGING, "Workers join or leave.")
        if not decision.is_change:
            return self._add(interval, decision, Outcome.KEEP)
        if not self.publishes:
            return self._add(interval, decision, Outcome.ADVISED)
        entry = self._add(interval, decision, Outcome.PUBLISHED)
        self.published_s = self._clock()
        decided_unix_s = interval.start_unix_s + interval.duration_s
        self.board.publish(entry.number, decision.current, decision.target, decided_unix_s)
        return entry

    def skip_interval(self, start_unix_s: float, duration_s: float, fault: str) -> DecisionEntry:
        """An interval without a complete observation: nothing is decided."""
        self._expire()
        newest = self.decisions.newest
        counts = newest.decision.current if newest is not None else WorkerCounts(0, 0)
        return self.decisions.add(
            DecisionEntry(
                number=self.decisions.next_number,
                start_unix_s=start_unix_s,
                duration_s=duration_s,
                decision=ScalingDecision(counts, counts, ()),
                outcome=Outcome.INCOMPLETE,
                detail=fault,
            )
        )

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
        target, age_s = self.board.target, self._clock() - self.published_s
        if self.board.pending and target is not None and age_s > self._rules.change_timeout_s:
            self.board.settle()
            detail = f"No acknowledgement came within {self._rules.change_timeout_s:g} s."
            self.decisions.set_outcome(target.number, Outcome.EXPIRED, detail)

    def _add(
        self, interval: Interval, decision: ScalingDecision, outcome: Outcome, detail: str = ""
    ) -> DecisionEntry:
        return self.decisions.add(
            DecisionEntry(
                number=self.decisions.next_number,
                start_unix_s=interval.start_unix_s,
                duration_s=interval.duration_s,
                decision=decision,
                outcome=outcome,
                detail=detail,
            )
        )
