"""The planner's decision: the goals set a floor, the load corrects, the budget of devices bounds. Pure.

The rules of load are those of Dynamo's load-based planner: the prefill queue and its trend, the KV usage of decode
workers, and a grace after a decode worker was added. A worker is removed only if the load of the remaining ones stays
below the threshold of an addition. So no addition follows a removal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_planner.goal_decision import (
    decide_by_goals,
    pool_by_goals,
    predict_demand,
)
from headrace_planner.observation import (
    NO_WORKERS,
    Interval,
    PlannedRole,
    Reason,
    ScalingDecision,
    WorkerCounts,
)
from headrace_planner.settings import BudgetSettings, LoadSettings, PlannerSettings


@dataclass(frozen=True, slots=True)
class LoadState:
    """What the next decision must know of earlier ones."""

    grace_intervals: int = 0
    """Further intervals in which no decode worker is removed."""


def decide_by_load(
    settings: LoadSettings, interval: Interval, state: LoadState
) -> tuple[tuple[Reason, ...], LoadState]:
    """The rules that ask for another number of workers: one worker more or less of a role.

    The interval has at least one sample, and its numbers of workers did not change. Where all workers have both roles,
    prompts or answers add one, and both must leave one unneeded before it is removed.
    """
    counts = interval.counts
    prefill_role, decode_role = PlannedRole.PREFILL, PlannedRole.DECODE
    if counts.is_pool:
        prefill_role = decode_role = PlannedRole.BOTH
    prefill = _prefill_rule(settings, interval, prefill_role)
    decode = _decode_rule(settings, interval, state, decode_role)
    grace = max(0, state.grace_intervals - 1)
    if decode is not None and decode.count > counts.of(decode_role):
        grace = settings.decode_grace_intervals
    reasons = tuple(reason for reason in (prefill, decode) if reason is not None)
    if counts.is_pool:
        added = tuple(reason for reason in reasons if reason.count > counts.both)
        reasons = added or (reasons if len(reasons) > 1 else ())
    return reasons, LoadState(grace)


def apply_reasons(counts: WorkerCounts, reasons: tuple[Reason, ...]) -> WorkerCounts:
    """The counts that the reasons ask for."""
    for reason in reasons:
        counts = counts.changed(reason.role, reason.count)
    return counts


def _workers_text(role: PlannedRole) -> str:
    return "worker" if role is PlannedRole.BOTH else f"{role} worker"


def _prefill_rule(settings: LoadSettings, interval: Interval, role: PlannedRole) -> Reason | None:
    weight = settings.low_prompt_weight
    queues = [sample.queue_per_worker(weight) for sample in interval.samples]
    mean = sum(queues) / len(queues)
    classes = _mean_counts(interval)
    note = f" Low prompts count {weight:g}." if weight < 1 and classes["low_prompts"] else ""
    expected = max(0.0, queues[-1] + (queues[-1] - queues[0]) * settings.trend_intervals)
    count = interval.counts.of(role)
    if mean > settings.prefill_up_queue and (
        expected > settings.prefill_up_queue or queues[-1] > settings.prefill_up_queue
    ):
        return Reason(
            role,
            "queue above threshold",
            count + 1,
            {
                "queue": mean,
                "expected_queue": expected,
                "threshold": settings.prefill_up_queue,
                **classes,
            },
            f"{mean:.2f} prompts wait for each {_workers_text(role)}, more than {settings.prefill_up_queue:g}, "
            f"and the trend leads to {expected:.2f}.{note}",
        )
    after = _load_without_one(mean, count)
    if count > 1 and mean < settings.prefill_down_queue and after < settings.prefill_up_queue:
        return Reason(
            role,
            "queue below threshold",
            count - 1,
            {
                "queue": mean,
                "queue_after": after,
                "threshold": settings.prefill_down_queue,
                **classes,
            },
            f"{mean:.2f} prompts wait for each {_workers_text(role)}, fewer than {settings.prefill_down_queue:g}. "
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


def _decode_rule(
    settings: LoadSettings, interval: Interval, state: LoadState, role: PlannedRole
) -> Reason | None:
    loads = [sample.decode_load for sample in interval.samples]
    mean = sum(loads) / len(loads)
    count, text = interval.counts.of(role), f"{_workers_text(role).capitalize()}s"
    if mean > settings.decode_up_load:
        return Reason(
            role,
            "load above threshold",
            count + 1,
            {"load": mean, "threshold": settings.decode_up_load},
            f"{text} have a mean load of {mean:.2f}, more than {settings.decode_up_load:g}.",
        )
    after = _load_without_one(mean, count)
    if (
        count > 1
        and state.grace_intervals == 0
        and mean < settings.decode_down_load
        and after < settings.decode_up_load
    ):
        return Reason(
            role,
            "load below threshold",
            count - 1,
            {"load": mean, "load_after": after, "threshold": settings.decode_down_load},
            f"{text} have a mean load of {mean:.2f}, less than {settings.decode_down_load:g}. "
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
        + counts.both * settings.both_worker_devices
    )


def within_budget(
    settings: BudgetSettings, wanted: WorkerCounts
) -> tuple[WorkerCounts, tuple[Reason, ...]]:
    """The wanted counts, raised to the floors and cut to the budget, and the rules that changed them.

    A cut keeps the proportion of the roles as far as the floors allow. Decode workers get what rounding leaves, because
    answers stop without them.
    """
    floors = WorkerCounts(settings.prefill_workers_min, settings.decode_workers_min)
    if wanted.is_pool:
        floors = WorkerCounts(0, 0, settings.both_workers_min)
    raised = WorkerCounts(*(max(wanted.of(role), floors.of(role)) for role in PlannedRole))
    reasons = [
        Reason(
            role,
            "fewest workers",
            floors.of(role),
            {"wanted": wanted.of(role), "fewest": floors.of(role)},
            f"At least {floors.of(role)} {_workers_text(role)}s run.",
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
            f"{raised.of(role)} {_workers_text(role)}s do not fit: all workers need {needed} devices, "
            f"and {settings.devices_max} are allowed.",
        )
        for role in PlannedRole
        if cut.of(role) != raised.of(role)
    ]
    return cut, tuple(reasons)


def _cut(settings: BudgetSettings, wanted: WorkerCounts, floors: WorkerCounts) -> WorkerCounts:
    """The largest counts within the budget in about the wanted proportion."""
    if wanted.is_pool:
        return WorkerCounts(0, 0, settings.devices_max // settings.both_worker_devices)
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
            f"Within the last {len(recent)} decisions, {kept.of(role)} {_workers_text(role)}s were needed.",
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
    settings: PlannerSettings, interval: Interval, state: PlannerState
) -> tuple[ScalingDecision, PlannerState]:
    """The decision at the end of an interval, which has at least one sample.

    Without a profile of the workers, only the load decides. While workers join or leave, the numbers stay as they are,
    because the samples show two deployments. They stay as well where workers of both roles run beside others.
    """
    observed = record_interval(settings, interval, state)
    current = interval.counts
    if interval.is_changing:
        return ScalingDecision(current, current, ()), observed
    if current.both and not current.is_pool:
        return ScalingDecision(current, current, (_mixed(current),)), observed
    if current == NO_WORKERS and observed.history[-1].counts.is_pool:
        fewest = settings.budget.both_workers_min
        return ScalingDecision(current, WorkerCounts(0, 0, fewest), (_none_left(fewest),)), observed
    by_load, load = decide_by_load(settings.load, interval, state.load)
    floors = _floors(settings, observed.history)
    wanted, by_goals = _raise_to(apply_reasons(current, by_load), floors)
    kept, by_need = keep_needed(settings, current, wanted, state.needed)
    target, by_budget = within_budget(settings.budget, kept)
    reasons = (*by_load, *by_goals, *by_need, *by_budget)
    needed = (*state.needed, needed_now(current, by_load, floors))
    recent = needed[max(0, len(needed) - settings.shrink_intervals) :]
    return ScalingDecision(current, target, reasons), PlannerState(observed.history, load, recent)


def _none_left(fewest: int) -> Reason:
    return Reason(
        PlannedRole.BOTH, "none left", fewest, {"fewest": fewest}, "No worker serves any more."
    )


def _mixed(counts: WorkerCounts) -> Reason:
    return Reason(
        PlannedRole.BOTH,
        "workers of one and of both roles",
        counts.both,
        {"prefill": counts.prefill, "decode": counts.decode, "both": counts.both},
        "Workers of both roles run beside workers of one role: the numbers are decided where all are of one kind.",
    )


def record_interval(
    settings: PlannerSettings, interval: Interval, state: PlannerState
) -> PlannerState:
    """The state after an interval without a decision, such as one in which an earlier decision is carried out.

    An interval at the end of which no worker served says nothing about later ones.
    """
    if interval.counts == NO_WORKERS and state.history:
        return state
    history = (*state.history, interval)[-settings.history_intervals_max :]
    return PlannerState(history, state.load, state.needed)


def _floors(settings: PlannerSettings, history: Sequence[Interval]) -> tuple[Reason, ...]:
    profile = history[-1].profile
    demand = predict_demand(settings, history) if profile is not None else None
    if profile is None or demand is None:
        return ()
    decide = pool_by_goals if history[-1].counts.is_pool else decide_by_goals
    return decide(settings, profile, demand)


def _raise_to(
    counts: WorkerCounts, floors: Sequence[Reason]
) -> tuple[WorkerCounts, tuple[Reason, ...]]:
    """The counts, raised to the floors, and the floors that raised them."""
    raising = tuple(floor for floor in floors if floor.count > counts.of(floor.role))
    return apply_reasons(counts, raising), raising
