"""Requests that begin early: when, what becomes of their blocks, and which models may."""

from __future__ import annotations

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler
from headrace_engine.vllm.step.groups import LayerGroup, check_late_layers
from headrace_engine.vllm.step.plan import LateLoad
from headrace_kv.layout.layout import STATE, TOKENS
from headrace_kv.receive.layer_overlap import OverlapSettings
from tests.unit.engine.vllm.scheduler.test_connector_scheduler import ATTENTION, admit_receive, step

END_S = 1e12
BLOCKS = (10, 11, 12, 13, 14)


def early(go_on: list[int] | None = None) -> tuple[ConnectorScheduler, list[set[int]]]:
    """A scheduler with one request, all but whose last layers are there, and what it evicts."""
    scheduler = ConnectorScheduler(ATTENTION, lambda reservation: None)
    evicted: list[set[int]] = []
    scheduler.late.evict = evicted.append
    admit_receive(scheduler, prompt=130, cached=0, go_on=go_on)
    scheduler.arriving("x1", END_S)
    return scheduler, evicted


def test_a_request_begins_when_only_its_last_layers_are_missing() -> None:
    scheduler, evicted = early()
    plan = scheduler.plan_step([], ())
    assert (plan.received, plan.late) == (["r"], [])
    assert scheduler.late.unsure
    # Not waited for while it does not run.
    assert scheduler.plan_step([step("other", 10, 1)], ()).late == []
    assert scheduler.plan_step([step("r", 129, 1)], ()).late == [LateLoad("x1", BLOCKS, END_S)]
    scheduler.settle("x1", whole=True)
    plan = scheduler.plan_step([step("r", 130, 1)], ())
    assert (plan.late, plan.received, plan.finished_sends) == ([], [], {})
    assert not scheduler.late
    assert not scheduler.late.finished("r")
    assert evicted == []


def test_it_waits_for_its_first_token_all_the_same() -> None:
    told: list[int] = []
    scheduler, _ = early(told)
    assert scheduler.plan_step([], ()).received == []
    scheduler.first_token("x1", 7)
    plan = scheduler.plan_step([], ())
    assert (plan.received, told) == (["r"], [7])
    assert scheduler.late


def test_one_that_is_whole_meanwhile_is_not_late() -> None:
    scheduler, _ = early()
    scheduler.settle("x1", whole=True)
    assert scheduler.plan_step([], ()).received == ["r"]
    assert not scheduler.late


def test_one_that_failed_meanwhile_does_not_begin() -> None:
    scheduler, _ = early()
    scheduler.settle("x1", whole=False)
    plan = scheduler.plan_step([], ())
    assert (plan.received, plan.failed) == ([], ["r"])
    assert not scheduler.late


def test_one_that_was_given_up_does_not_begin() -> None:
    scheduler, _ = early()
    scheduler.finished("r")
    assert scheduler.plan_step([], ()).received == []
    scheduler.settle("x1", whole=False)
    assert scheduler.plan_step([], ()).failed == ["r"]


@pytest.mark.parametrize("whole", [True, False])
def test_its_blocks_stay_until_nobody_writes(whole: bool) -> None:
    scheduler, evicted = early()
    scheduler.plan_step([], ())
    scheduler.plan_step([step("r", 129, 1)], ())
    assert scheduler.late.finished("r")
    # Nobody may find them in the prefix cache, so others need not be held back.
    assert evicted == [set(BLOCKS)]
    assert not scheduler.late.unsure
    assert scheduler.plan_step([], ()).finished_sends == {}
    scheduler.settle("x1", whole=whole)
    plan = scheduler.plan_step([], ())
    assert (plan.finished_sends, plan.late) == ({"r": "x1"}, [])
    scheduler.settle("x1", whole=whole)
    assert scheduler.plan_step([], ()).finished_sends == {}


def test_one_that_is_aborted_while_it_is_reported_keeps_its_blocks() -> None:
    scheduler, _ = early()
    # The ranks report it as received during this step, and vLLM hears of the abort first.
    assert scheduler.plan_step([], ()).received == ["r"]
    assert scheduler.late.withheld({"r", "other"}) == set()
    assert scheduler.late.finished("r")
    assert scheduler.late.withheld({"r", "other"}) == {"r"}
    scheduler.settle("x1", whole=False)
    assert scheduler.plan_step([], ()).finished_sends == {"r": "x1"}
    assert scheduler.late.withheld({"r"}) == set()


def test_one_that_is_lost_before_it_runs_fails_in_its_first_step() -> None:
    scheduler, evicted = early()
    scheduler.plan_step([], ())
    scheduler.settle("x1", whole=False)
    assert scheduler.plan_step([], ()).late == []
    plan = scheduler.plan_step([step("r", 129, 1)], ())
    assert plan.late == [LateLoad("x1", BLOCKS, END_S, lost=True)]
    assert not scheduler.late.finished("r")
    assert evicted == [set(BLOCKS)]
    assert not scheduler.late


def test_one_that_vllm_computes_instead_is_waited_for_until_nobody_writes() -> None:
    scheduler, _ = early()
    scheduler.plan_step([], ())
    run = [step("r", 129, 1)]
    # Given up by a rank, and scheduled again: what the steps compute meanwhile is not believed.
    for _ in range(3):
        assert scheduler.plan_step(run, ()).late == [LateLoad("x1", BLOCKS, END_S)]
    scheduler.settle("x1", whole=False)
    assert scheduler.plan_step(run, ()).late == [LateLoad("x1", BLOCKS, END_S, lost=True)]
    assert scheduler.plan_step(run, ()).late == []
    assert not scheduler.late


def of_kind(kind: str, layers: int) -> LayerGroup:
    numbered = tuple((number, f"l{number}") for number in range(layers))
    return LayerGroup(0, kind, kind, 1, 32, "", numbered)  # type: ignore[arg-type]


def test_the_first_layer_must_be_there() -> None:
    check_late_layers([of_kind(TOKENS, 4)], OverlapSettings(3))
    with pytest.raises(ConfigError, match="choose 3 or less"):
        check_late_layers([of_kind(TOKENS, 4)], OverlapSettings(4))


def test_models_with_states_or_several_groups_are_refused_by_name() -> None:
    groups = [of_kind(TOKENS, 4), of_kind(STATE, 4)]
    check_late_layers(groups, OverlapSettings())
    for refused in (groups, groups[1:]):
        with pytest.raises(ConfigError, match=STATE):
            check_late_layers(refused, OverlapSettings(1))
