"""Keeps workers that a rule has needed lately, so that chance does not add and remove them in turn. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_planner.budget import devices_of
from headrace_planner.observation import PlannedRole, Reason, WorkerCounts
from headrace_planner.settings import PlannerSettings


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
