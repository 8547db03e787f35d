"""The planner's decision: the goals set a floor, the load corrects, the budget of devices bounds. Pure.

The rules of load are those of Dynamo's load-based planner: the prefill queue and its trend, the KV usage of decode
workers, and a grace after a decode worker was added. A worker is removed only if the load of the remaining ones stays
below the threshold of an addition. So no addition follows a removal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_planner.goal_decision import corrections, decide_by_goals, predict_demand
from headrace_planner.observation import (
    Interval,
    PlannedRole,
    Reason,
    ScalingDecision,
    WorkerCounts,
)
from headrace_planner.settings import BudgetSettings, LoadSettings, PlannerSettings, WorkerProfile


@dataclass(frozen=True, slots=True)
class LoadState:
    """What the next decision must know of earlier ones."""

    grace_intervals: int = 0
    """Further intervals in which no decode worker is removed."""


def decide_by_load(
    settings: LoadSettings, interval: Interval, state: LoadState
) -> tuple[tuple[Reason, ...], LoadState]:
    """The rules that ask for another number of workers: at most one a role, and one worker more or less.

    The interval has at least one sample, and its numbers of workers did not change.
    """
    prefill = _prefill_rule(settings, interval)
    decode = _decode_rule(settings, interval, state)
    grace = max(0, state.grace_intervals - 1)
    if decode is not None and decode.count > interval.counts.decode:
        grace = settings.decode_grace_intervals
    return tuple(reason for reason in (prefill, decode) if reason is not None), LoadState(grace)


def apply_reasons(counts: WorkerCounts, reasons: tuple[Reason, ...]) -> WorkerCounts:
    """The counts that the reasons ask for."""
    for reason in reasons:
        counts = counts.changed(reason.role, reason.count)
    return counts


def _prefill_rule(settings: LoadSettings, interval: Interval) -> Reason | None:
    weight = settings.low_prompt_weight
    queues = [sample.queue_per_worker(weight) for sample in interval.samples]
    mean = sum(queues) / len(queues)
    classes = _mean_counts(interval)
    note = f" Low prompts count {weight:g}." if weight < 1 and classes["low_prompts"] else ""
    expected = max(0.0, queues[-1] + (queues[-1] - queues[0]) * settings.trend_intervals)
    count = interval.counts.prefill
    if mean > settings.prefill_up_queue and (
        expected > settings.prefill_up_queue or queues[-1] > settings.prefill_up_queue
    ):
        return Reason(
            PlannedRole.PREFILL,
            "queue above threshold",
            count + 1,
            {
                "queue": mean,
                "expected_queue": expected,
                "threshold": settings.prefill_up_queue,
                **classes,
            },
            f"{mean:.2f} prompts wait for each prefill worker, more than {settings.prefill_up_queue:g}, "
            f"and the trend leads to {expected:.2f}.{note}",
        )
    after = _load_without_one(mean, count)
    if count > 1 and mean < settings.prefill_down_queue and after < settings.prefill_up_queue:
        return Reason(
            PlannedRole.PREFILL,
            "queue below threshold",
            count - 1,
            {
                "queue": mean,
                "queue_after": after,
                "threshold": settings.prefill_down_queue,
                **classes,
            },
            f"{mean:.2f} prompts wait for each prefill worker, fewer than {settings.prefill_down_queue:g}. "
            f"With one worker less it is {after:.2f}.{note}",
        )
    return None


def _mean_counts(interval: Interval) -> dict[str, float]:
    """The mean numbers of queued prompts of the classes high and low."""
    counts = [sample.queued_by_class for sample in interval.samples]
    return {
        "high_prompts": sum(one.high for one in counts) / len(counts),
        "low_prompts": sum(one.low for one in counts) / len(counts),
    }


def _decode_rule(settings: LoadSettings, interval: Interval, state: LoadState) -> Reason | None:
    loads = [sample.decode_load for sample in interval.samples]
    mean = sum(loads) / len(loads)
    count = interval.counts.decode
    if mean > settings.decode_up_load:
        return Reason(
            PlannedRole.DECODE,
            "load above threshold",
            count + 1,
            {"load": mean, "threshold": settings.decode_up_load},
            f"Decode workers have a mean load of {mean:.2f}, more than {settings.decode_up_load:g}.",
        )
    after = _load_without_one(mean, count)
    if (
        count > 1
        and state.grace_intervals == 0
        and mean < settings.decode_down_load
        and after < settings.decode_up_load
    ):
        return Reason(
            PlannedRole.DECODE,
            "load below threshold",
            count - 1,
            {"load": mean, "load_after": after, "threshold": settings.decode_down_load},
            f"Decode workers have a mean load of {mean:.2f}, less than {settings.decode_down_load:g}. "
            f"With one worker less it is {after:.2f}.",
        )
    return None


def _load_without_one(load: float, count: int) -> float:
    return load * count / (count - 1) if count > 1 else load


def devices_of(settings: BudgetSettings, counts: WorkerCounts) -> int:
    """Devices that these workers have."""
    return (
        counts.prefill * settings.prefill_worker_devices
        + counts.decode * settings.decode_worker_devices
    )


def within_budget(
    settings: BudgetSettings, wanted: WorkerCounts
) -> tuple[WorkerCounts, tuple[Reason, ...]]:
    """The wanted counts, raised to the floors and cut to the budget, and the rules that changed them.

    A cut keeps the proportion of the roles as far as the floors allow. Decode workers get what rounding leaves, because
    answers stop without them.
    """
    floors = WorkerCounts(settings.prefill_workers_min, settings.decode_workers_min)
    raised = WorkerCounts(max(wanted.prefill, floors.prefill), max(wanted.decode, floors.decode))
    reasons = [
        Reason(
            role,
            "fewest workers",
            floors.of(role),
            {"wanted": wanted.of(role), "fewest": floors.of(role)},
            f"At least {floors.of(role)} {role} workers run.",
        )
        for role in PlannedRole
        if wanted.of(role) < floors.of(role)
    ]
    needed = devices_of(settings, raised)
    if needed <= settings.devices_max:
        return raised, tuple(reasons)
    cut = _cut(settings, raised, floors)
    reasons += [
        Reason(
            role,
            "budget",
            cut.of(role),
            {"wanted": raised.of(role), "devices": needed, "devices_max": settings.devices_max},
            f"{raised.of(role)} {role} workers do not fit: all workers need {needed} devices, "
            f"and {settings.devices_max} are allowed.",
        )
        for role in PlannedRole
        if cut.of(role) != raised.of(role)
    ]
    return cut, tuple(reasons)


def _cut(settings: BudgetSettings, wanted: WorkerCounts, floors: WorkerCounts) -> WorkerCounts:
    """The largest counts within the budget in about the wanted proportion."""
    share = settings.devices_max / devices_of(settings, wanted)
    floor_devices = floors.decode * settings.decode_worker_devices
    affordable = (settings.devices_max - floor_devices) // settings.prefill_worker_devices
    prefill = min(affordable, max(floors.prefill, round(wanted.prefill * share)))
    left = settings.devices_max - prefill * settings.prefill_worker_devices
    return WorkerCounts(prefill, min(wanted.decode, left // settings.decode_worker_devices))


def needed_now(
    current: WorkerCounts, by_load: Sequence[Reason], floors: Sequence[Reason]
) -> WorkerCounts:
    """The workers that the rules justify at this moment: the floors, and those that the load does not give up."""
    needed = WorkerCounts(0, 0)
    for role in PlannedRole:
        wished = [reason.count for reason in by_load if reason.role is role]
        kept = 0 if wished and wished[-1] < current.of(role) else max((current.of(role), *wished))
        counts = [reason.count for reason in floors if reason.role is role]
        needed = needed.changed(role, max((kept, *counts)))
    return needed


def keep_needed(
    settings: PlannerSettings,
    current: WorkerCounts,
    wanted: WorkerCounts,
    recent: Sequence[WorkerCounts],
) -> tuple[WorkerCounts, tuple[Reason, ...]]:
    """The wanted counts, and for a role that would shrink at least what it needed lately.

    Workers are not kept when the budget has no room for them beside the wanted ones.
    """
    kept = wanted
    for role in PlannedRole:
        most = max((one.of(role) for one in recent), default=0)
        if wanted.of(role) < current.of(role):
            kept = kept.changed(role, max(wanted.of(role), min(most, current.of(role))))
    if kept == wanted or devices_of(settings.budget, kept) > settings.budget.devices_max:
        return wanted, ()
    reasons = tuple(
        Reason(
            role,
            "recently needed",
            kept.of(role),
            {"wanted": wanted.of(role), "intervals": len(recent)},
            f"Within the last {len(recent)} decisions, {kept.of(role)} {role} workers were needed.",
        )
        for role in PlannedRole
        if kept.of(role) != wanted.of(role)
    )
    return kept, reasons


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
) -> tuple[ScalingDecision, PlannerState]:
    """The decision at the end of an interval, which has at least one sample.

    Without a profile, only the load decides. While workers join or leave, the numbers stay as they are, because the
    samples show two deployments.
    """
    observed = record_interval(settings, interval, state)
    current = interval.counts
    if interval.is_changing:
        return ScalingDecision(current, current, ()), observed
    by_load, load = decide_by_load(settings.load, interval, state.load)
    floors = _floors(settings, profile, observed.history)
    wanted, by_goals = _raise_to(apply_reasons(current, by_load), floors)
    kept, by_need = keep_needed(settings, current, wanted, state.needed)
    target, by_budget = within_budget(settings.budget, kept)
    reasons = (*by_load, *by_goals, *by_need, *by_budget)
    needed = (*state.needed, needed_now(current, by_load, floors))
    recent = needed[max(0, len(needed) - settings.shrink_intervals) :]
    return ScalingDecision(current, target, reasons), PlannerState(observed.history, load, recent)


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
