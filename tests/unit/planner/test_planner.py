"""The whole decision: floors by goals, corrections by load, the budget, and no decision during a change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import Conflict
from headrace_planner.observation import LoadSample, PlannedRole, WorkerCounts, own_target
from headrace_planner.planner import PlannerState, devices_of, plan, record_interval, within_budget
from headrace_planner.settings import BudgetSettings, PlannerSettings
from tests.unit.planner.samples import PROFILE, interval, pool_sample, requests, sample

SETTINGS = PlannerSettings()


def test_a_predicted_ramp_adds_several_workers_at_once() -> None:
    settings = PlannerSettings(budget=BudgetSettings(devices_max=40))
    ramp = [
        interval(sample(prefill=2), requests=requests(120 * step), profile=PROFILE)
        for step in range(1, 13)
    ]
    state = PlannerState(tuple(ramp[:-1]))
    decision, _ = plan(settings, ramp[-1], state)
    # 48 requests per second came last, and 52 are next. Each takes a worker 0.1 s.
    assert decision.target.prefill == 6


def test_without_a_profile_only_the_load_decides() -> None:
    decision, _ = plan(SETTINGS, interval(requests=requests(10_000)), PlannerState())
    assert decision.target.prefill == 1
    assert decision.target.decode == 2


@st.composite
def budgets(draw: st.DrawFn) -> BudgetSettings:
    floors = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    devices = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    least = floors[0] * devices[0] + floors[1] * devices[1]
    return BudgetSettings(
        prefill_workers_min=floors[0],
        decode_workers_min=floors[1],
        prefill_worker_devices=devices[0],
        decode_worker_devices=devices[1],
        devices_max=draw(st.integers(least, least + 40)),
    )


@given(budgets(), st.integers(0, 100), st.integers(0, 100))
def test_floors_and_budget_hold_always(settings: BudgetSettings, prefill: int, decode: int) -> None:
    wanted = WorkerCounts(prefill, decode)
    target, reasons = within_budget(settings, wanted)
    assert target.prefill >= settings.prefill_workers_min
    assert target.decode >= settings.decode_workers_min
    assert devices_of(settings, target) <= settings.devices_max
    for role in PlannedRole:
        named = [reason for reason in reasons if reason.role is role]
        assert bool(named) == (target.of(role) != wanted.of(role))
        if named:
            assert named[-1].count == target.of(role)


def test_a_pool_is_decided_by_load_goals_and_budget() -> None:
    queue = pool_sample(queued=9, loads=(0.2, 0.2))
    settings = PlannerSettings(budget=BudgetSettings(devices_max=6, both_worker_devices=2))
    decision, _ = plan(settings, interval(queue), PlannerState())
    assert decision.target == WorkerCounts(0, 0, 3)
    full = interval(pool_sample(queued=9, loads=(0.2,) * 3))
    decision, _ = plan(settings, full, PlannerState())
    assert decision.target == WorkerCounts(0, 0, 3)
    assert [reason.rule for reason in decision.reasons][-1] == "budget"
    busy = interval(pool_sample(), requests=requests(3_000), profile=PROFILE)
    decision, _ = plan(PlannerSettings(), busy, PlannerState())
    assert decision.target.both > 2
    assert (decision.target.prefill, decision.target.decode) == (0, 0)
    assert "prompts and answers" in [reason.rule for reason in decision.reasons]
    idle = interval(pool_sample(loads=(0.0, 0.0)))
    floor = PlannerSettings(budget=BudgetSettings(both_workers_min=2), shrink_intervals=1)
    decision, _ = plan(floor, idle, PlannerState())
    assert decision.target == WorkerCounts(0, 0, 2)


def test_nothing_is_decided_while_workers_of_both_roles_run_beside_others() -> None:
    mixed = replace(pool_sample(queued=50, loads=(0.9, 0.9)), prefill_workers=1)
    decision, _ = plan(PlannerSettings(), interval(mixed, profile=PROFILE), PlannerState())
    assert not decision.is_change
    assert "run beside workers of one role" in decision.reasons[0].sentence
    assert str(decision.current) == "1 P, 0 D, 2 W"


@pytest.mark.parametrize(
    "before,after", [(sample(), WorkerCounts(1, 1)), (pool_sample(), WorkerCounts(0, 0, 1))]
)
def test_the_fewest_workers_of_the_last_kind_are_wanted_when_none_is_left(
    before: LoadSample, after: WorkerCounts
) -> None:
    state = record_interval(PlannerSettings(), interval(before), PlannerState())
    none = interval(sample(prefill=0, queued=4, loads=()))
    for _ in range(2):
        decision, state = plan(PlannerSettings(), none, state)
        assert decision.target == after


@pytest.mark.parametrize(
    "own,observed,wanted,target",
    [
        ((1, 1), (1, 1), (2, 3), (2, 3)),
        # A decode worker was started by hand.
        ((1, 1), (1, 2), (1, 3), (1, 2)),
        ((1, 1), (1, 2), (1, 1), (1, 0)),
        ((1, 0), (1, 2), (1, 1), (1, 0)),
        # The target was carried out already.
        ((2, 3), (1, 1), (2, 3), (2, 3)),
    ],
)
def test_workers_that_others_have_started_count_and_are_left_alone(
    own: tuple[int, int],
    observed: tuple[int, int],
    wanted: tuple[int, int],
    target: tuple[int, int],
) -> None:
    found = own_target(WorkerCounts(*own), WorkerCounts(*observed), WorkerCounts(*wanted))
    assert found == WorkerCounts(*target)


def test_a_target_from_fewer_workers_than_run_is_refused() -> None:
    with pytest.raises(Conflict, match="decided from 1 P, 1 D, and 1 P, 2 D run here"):
        own_target(WorkerCounts(1, 2), WorkerCounts(1, 1), WorkerCounts(1, 3))
