"""The planner's decision: the goals set a floor, the load corrects, the budget bounds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_planner.budget import within_budget
from headrace_planner.goal_decision import corrections, decide_by_goals, predict_demand
from headrace_planner.load_decision import LoadState, apply_reasons, decide_by_load
from headrace_planner.observation import Decision, Interval, Reason, WorkerCounts
from headrace_planner.profile import WorkerProfile
from headrace_planner.settings import PlannerSettings
from headrace_planner.steadiness import keep_needed, needed_now


@dataclass(frozen=True, slots=True)
class PlannerState:
    """What one decision leaves for the next."""

    history: tuple[Interval, ...] = ()
    load: LoadState = field(default_factory=LoadState)
    needed: tuple[WorkerCounts, ...] = ()
    """What the rules needed at the last decisions."""


def plan(
    settings: PlannerSettings,
    profile: WorkerProfile | None,
    interval: Interval,
    state: PlannerState,
) -> tuple[Decision, PlannerState]:
    """The decision at the end of an interval, which has at least one sample.

    Without a profile, only the load decides. While workers join or leave, the numbers stay as they are, because the
    samples show two deployments.
    """
    observed = record_interval(settings, interval, state)
    current = interval.counts
    if interval.is_changing:
        return Decision(current, current, ()), observed
    by_load, load = decide_by_load(settings.load, interval, state.load)
    floors = _floors(settings, profile, observed.history)
    wanted, by_goals = _raise_to(apply_reasons(current, by_load), floors)
    kept, by_need = keep_needed(settings, current, wanted, state.needed)
    target, by_budget = within_budget(settings.budget, kept)
    reasons = (*by_load, *by_goals, *by_need, *by_budget)
    needed = (*state.needed, needed_now(current, by_load, floors))
    recent = needed[max(0, len(needed) - settings.shrink_intervals) :]
    return Decision(current, target, reasons), PlannerState(observed.history, load, recent)


def record_interval(
    settings: PlannerSettings, interval: Interval, state: PlannerState
) -> PlannerState:
    """The state after an interval without a decision, such as one in which an earlier decision is carried out."""
    history = (*state.history, interval)[-settings.history_intervals_max :]
    return PlannerState(history, state.load, state.needed)


def _floors(
    settings: PlannerSettings, profile: WorkerProfile | None, history: Sequence[Interval]
) -> tuple[Reason, ...]:
    demand = predict_demand(settings, history) if profile is not None else None
    if profile is None or demand is None:
        return ()
    correction = corrections(settings, profile, history[-1])
    return decide_by_goals(settings, profile, demand, correction)


def _raise_to(
    counts: WorkerCounts, floors: Sequence[Reason]
) -> tuple[WorkerCounts, tuple[Reason, ...]]:
    """The counts, raised to the floors, and the floors that raised them."""
    raising = tuple(floor for floor in floors if floor.count > counts.of(floor.role))
    return apply_reasons(counts, raising), raising
