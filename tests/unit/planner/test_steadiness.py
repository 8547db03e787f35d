"""Workers that were needed lately stay, unless the budget needs their devices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_planner.observation import PlannedRole, WorkerCounts
from headrace_planner.planner import PlannerState, keep_needed, plan
from headrace_planner.settings import BudgetSettings, PlannerSettings
from tests.unit.planner.samples import PROFILE, interval, requests, sample

SETTINGS = PlannerSettings(shrink_intervals=3, budget=BudgetSettings(devices_max=10))


def test_the_other_role_gets_the_devices() -> None:
    recent = (WorkerCounts(7, 2),)
    wanted = WorkerCounts(2, 8)
    assert keep_needed(SETTINGS, WorkerCounts(7, 2), wanted, recent) == (wanted, ())


@given(st.lists(st.integers(0, 900), min_size=12, max_size=30))
def test_no_role_grows_and_shrinks_within_the_intervals(counts: list[int]) -> None:
    state, current = PlannerState(), WorkerCounts(1, 1)
    grown_at = dict.fromkeys(PlannedRole, -100)
    for number, count in enumerate(counts):
        seen = interval(
            sample(prefill=current.prefill, loads=(0.1,) * current.decode),
            requests=requests(count) if count else None,
            profile=PROFILE,
        )
        decision, state = plan(SETTINGS, seen, state)
        crowded = any(one.rule == "budget" for one in decision.reasons)
        for role in PlannedRole:
            if decision.target.of(role) > current.of(role):
                grown_at[role] = number
            elif decision.target.of(role) < current.of(role) and not crowded:
                other = next(one for one in PlannedRole if one is not role)
                needs_room = decision.target.of(other) > current.of(other)
                assert needs_room or number - grown_at[role] >= SETTINGS.shrink_intervals
        current = decision.target


def test_without_intervals_a_worker_leaves_at_once() -> None:
    settings = PlannerSettings(shrink_intervals=0)
    idle = interval(sample(prefill=2, loads=(0.1, 0.1)))
    decision, state = plan(settings, idle, PlannerState())
    assert decision.target == WorkerCounts(1, 1)
    assert state.needed == ()
