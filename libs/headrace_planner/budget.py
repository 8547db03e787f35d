"""Floors and the budget of devices. Pure."""

from __future__ import annotations

from headrace_planner.observation import PlannedRole, Reason, WorkerCounts
from headrace_planner.settings import BudgetSettings


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
