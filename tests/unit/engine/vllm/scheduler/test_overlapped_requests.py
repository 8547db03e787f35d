"""Requests that run before their last layers have arrived: when, their blocks, and the models that support it."""

from __future__ import annotations

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.vllm.layer_groups import LayerGroup, check_overlap_layers
from headrace_engine.vllm.scheduler.step_planner import StepPlanner
from headrace_engine.vllm.step_plan import OverlappedLoad
from headrace_kv.layout.layout import STATE, TOKENS
from headrace_kv.receive.observer import OverlapSettings
from tests.unit.engine.vllm.scheduler.test_step_planner import ATTENTION, admit_receive, step

END_S = 1e12
BLOCKS = (10, 11, 12, 13, 14)


def overlap_ready(add_token: list[int] | None = None) -> tuple[StepPlanner, list[set[int]]]:
    """A planner with a request that lacks only its last layers, and the blocks that it evicts."""
    planner = StepPlanner(ATTENTION, lambda reservation: None)
    evicted: list[set[int]] = []
    planner.overlapped.bind_eviction(evicted.append)
    admit_receive(planner, prompt=130, cached=0, add_token=add_token)
    planner.transfer_overlap_ready("x1", END_S)
    return planner, evicted


def test_a_request_runs_when_only_its_last_layers_are_missing() -> None:
    planner, evicted = overlap_ready()
    plan = planner.plan_step([], ())
    assert (plan.received, plan.overlapped) == (["r"], [])
    assert planner.overlapped.prefix_cache_incomplete
    # Steps without the request do not wait for it.
    assert planner.plan_step([step("other", 10, 1)], ()).overlapped == []
    assert planner.plan_step([step("r", 129, 1)], ()).overlapped == [
        OverlappedLoad("x1", BLOCKS, END_S)
    ]
    planner.transfer_settled("x1", whole=True)
    plan = planner.plan_step([step("r", 130, 1)], ())
    assert (plan.overlapped, plan.received, plan.finished_sends) == ([], [], {})
    assert not planner.overlapped
    assert not planner.overlapped.request_finished("r")
    assert evicted == []


@pytest.mark.parametrize("whole", [True, False])
def test_one_that_settles_before_the_plan_is_not_overlapped(whole: bool) -> None:
    planner, _ = overlap_ready()
    planner.transfer_settled("x1", whole=whole)
    plan = planner.plan_step([], ())
    assert (plan.received, plan.failed) == ((["r"], []) if whole else ([], ["r"]))
    assert not planner.overlapped


def test_a_cancelled_one_does_not_run() -> None:
    planner, _ = overlap_ready()
    planner.request_finished("r")
    assert planner.plan_step([], ()).received == []
    planner.transfer_settled("x1", whole=False)
    assert planner.plan_step([], ()).failed == ["r"]


@pytest.mark.parametrize("whole", [True, False])
def test_its_blocks_stay_until_no_sender_writes(whole: bool) -> None:
    planner, evicted = overlap_ready()
    planner.plan_step([], ())
    assert planner.overlapped.withheld({"r"}) == set()
    planner.plan_step([step("r", 129, 1)], ())
    assert planner.overlapped.request_finished("r")
    # They are out of the prefix cache, so other requests can be scheduled.
    assert evicted == [set(BLOCKS)]
    assert not planner.overlapped.prefix_cache_incomplete
    assert planner.plan_step([], ()).finished_sends == {}
    planner.transfer_settled("x1", whole=whole)
    plan = planner.plan_step([], ())
    assert (plan.finished_sends, plan.overlapped) == ({"r": "x1"}, [])
    planner.transfer_settled("x1", whole=whole)
    assert planner.plan_step([], ()).finished_sends == {}


def test_one_that_is_aborted_while_it_is_reported_as_received_keeps_its_blocks() -> None:
    planner, _ = overlap_ready()
    # vLLM processes the abort before the ranks report it as received in the same step.
    assert planner.plan_step([], ()).received == ["r"]
    assert planner.overlapped.withheld({"r", "other"}) == set()
    assert planner.overlapped.request_finished("r")
    assert planner.overlapped.withheld({"r", "other"}) == {"r"}
    planner.transfer_settled("x1", whole=False)
    assert planner.plan_step([], ()).finished_sends == {"r": "x1"}
    assert planner.overlapped.withheld({"r"}) == set()


def test_one_that_is_lost_before_it_runs_fails_in_its_first_step() -> None:
    planner, evicted = overlap_ready()
    planner.plan_step([], ())
    planner.transfer_settled("x1", whole=False)
    assert planner.plan_step([], ()).overlapped == []
    plan = planner.plan_step([step("r", 129, 1)], ())
    assert plan.overlapped == [OverlappedLoad("x1", BLOCKS, END_S, lost=True)]
    assert not planner.overlapped.request_finished("r")
    assert evicted == [set(BLOCKS)]
    assert not planner.overlapped


def test_one_that_is_aborted_and_settles_before_vllm_handles_it_is_freed_by_vllm() -> None:
    """With several steps under way, another step is planned before the results of the one that received it."""
    planner, evicted = overlap_ready()
    assert planner.plan_step([], ()).received == ["r"]
    assert planner.overlapped.request_finished("r")
    planner.transfer_settled("x1", whole=True)
    # Freed by the ranks' report too, they would be freed twice.
    assert planner.plan_step([], ()).finished_sends == {}
    assert planner.overlapped.withheld({"r"}) == set()
    assert evicted == [set(BLOCKS)]
    assert not planner.overlapped


def test_a_loss_is_reported_once_and_its_blocks_leave_the_prefix_cache() -> None:
    planner, evicted = overlap_ready()
    planner.plan_step([], ())
    run = [step("r", 129, 1)]
    # Before vLLM handles that a rank has abandoned it, it may plan another step with it.
    for _ in range(3):
        assert planner.plan_step(run, ()).overlapped == [OverlappedLoad("x1", BLOCKS, END_S)]
    planner.transfer_settled("x1", whole=False)
    assert planner.plan_step(run, ()).overlapped == [OverlappedLoad("x1", BLOCKS, END_S, lost=True)]
    assert planner.plan_step(run, ()).overlapped == []
    assert planner.overlapped.prefix_cache_incomplete
    assert not planner.overlapped.request_finished("r")
    assert evicted == [set(BLOCKS)]
    assert not planner.overlapped


def of_kind(kind: str, layers: int) -> LayerGroup:
    numbered = tuple((number, f"l{number}") for number in range(layers))
    return LayerGroup(0, kind, kind, 1, 32, "", numbered)  # type: ignore[arg-type]


def test_the_first_layer_cannot_be_overlapped() -> None:
    check_overlap_layers([of_kind(TOKENS, 4)], OverlapSettings(3))
    with pytest.raises(ConfigError, match="choose 3 or less"):
        check_overlap_layers([of_kind(TOKENS, 4)], OverlapSettings(4))


def test_models_with_states_or_several_groups_are_rejected_with_their_names() -> None:
    groups = [of_kind(TOKENS, 4), of_kind(STATE, 4)]
    check_overlap_layers(groups, OverlapSettings())
    for rejected in (groups, groups[1:]):
        with pytest.raises(ConfigError, match=STATE):
            check_overlap_layers(rejected, OverlapSettings(1))
