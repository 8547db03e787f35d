"""What requests load from lower tiers and store there."""

from __future__ import annotations

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.vllm.step.groups import LayerGroup
from headrace_engine.vllm.step.plan import StepPlan
from headrace_engine.vllm.tiers.planner import TierPlanner, plan_tiers
from headrace_kv.layout.layout import STATE, TOKENS, GroupKind
from headrace_kv.manager.lower_tiers import LowerTiers, TierCopy
from headrace_kv.manager.settings import TierSettings
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.layer_overlap import OverlapSettings

BLOCK = 4


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in numbers]


def planner(host: int = 8, **more: int) -> TierPlanner:
    return TierPlanner(LowerTiers({Tier.HOST: host}, **more), BLOCK)


def plan_of(tiers: TierPlanner) -> StepPlan:
    plan = StepPlan()
    tiers.add_to(plan)
    return plan


def copies_of(plan: StepPlan) -> list[tuple[str, TierCopy]]:
    return [(one.request_id, one.copy) for one in plan.copies]


def answered(tiers: TierPlanner, request_id: str, names: list[bytes], block_ids: list[int]) -> None:
    """A request that computes all its blocks in one step, and ends."""
    tiers.request_added(request_id, names)
    tiers.step_planned(request_id, len(names) * BLOCK, block_ids, replaces=True)
    tiers.request_finished(request_id, sends=False)


def test_blocks_are_stored_once_a_step_has_computed_them() -> None:
    tiers, names = planner(), hashes(1, 2)
    tiers.request_added("r", names)
    tiers.step_planned("r", 6, [10, 11], replaces=True)
    assert plan_of(tiers).copies == []
    tiers.step_planned("r", 9, [12], replaces=False)
    assert copies_of(plan_of(tiers)) == [("r", TierCopy(Tier.DEVICE, Tier.HOST, (10,), (0,)))]
    assert tiers.request_finished("r", sends=True)
    plan = plan_of(tiers)
    assert copies_of(plan) == [("r", TierCopy(Tier.DEVICE, Tier.HOST, (11,), (1,)))]
    assert plan.finished_stores == {"r": True}


def test_tokens_that_never_ran_are_not_stored() -> None:
    tiers = planner()
    tiers.request_added("r", hashes(1, 2))
    assert not tiers.request_finished("r", sends=False)
    assert plan_of(tiers).copies == []


def test_a_hit_is_loaded_before_the_request_runs() -> None:
    tiers, names = planner(), hashes(1, 2, 3)
    answered(tiers, "a", names, [5, 6, 7])
    plan_of(tiers)
    tiers.request_added("b", names)
    # The last block is not full below token 11.
    assert tiers.find("b", 4, 11) == 4
    assert tiers.find("b", 4, 12) == 8
    assert tiers.blocks_allocated("b", [20, 21, 22, 23], 10) == 8
    plan = plan_of(tiers)
    assert copies_of(plan) == [("b", TierCopy(Tier.HOST, Tier.DEVICE, (1, 2), (21, 22)))]
    assert plan.loads == {"b": True}
    assert tiers.is_loading
    tiers.loads_ended(["b"], [])
    assert not tiers.is_loading


def test_an_ended_request_that_loads_leaves_its_blocks_to_the_end_of_the_load() -> None:
    tiers, names = planner(), hashes(1)
    answered(tiers, "a", names, [5])
    tiers.request_added("b", names)
    tiers.find("b", 0, 4)
    tiers.blocks_allocated("b", [9], 4)
    plan_of(tiers)
    assert not tiers.request_finished("b", sends=False)
    assert plan_of(tiers).finished_stores == {}


def test_a_hit_that_vllm_does_not_use_is_released() -> None:
    tiers, names = planner(host=1), hashes(1)
    answered(tiers, "a", names, [5])
    tiers.request_added("b", names)
    assert tiers.find("b", 0, 4) == 4
    assert tiers.blocks_allocated("b", [9], 0) == 0
    tiers.request_added("c", names)
    tiers.find("c", 0, 4)
    tiers.request_finished("c", sends=False)
    answered(tiers, "d", hashes(2), [6])
    tiers.request_added("e", hashes(2))
    assert tiers.find("e", 0, 4) == 4


def test_a_request_waits_for_its_load_until_that_has_ended() -> None:
    tiers, names = planner(), hashes(1)
    answered(tiers, "a", names, [5])
    tiers.request_added("b", names)
    tiers.find("b", 0, 4)
    loads = [[tiers.loads_for(request_id) for request_id in "ab"]]
    tiers.blocks_allocated("b", [9], 4)
    loads.append([tiers.loads_for(request_id) for request_id in "ab"])
    tiers.loads_ended(["b"], [])
    loads.append([tiers.loads_for(request_id) for request_id in "ab"])
    assert loads == [[False, False], [False, True], [False, False]]


@pytest.mark.parametrize("finished", [False, True])
def test_a_failed_load_forgets_its_blocks(finished: bool) -> None:
    tiers, names = planner(), hashes(1)
    answered(tiers, "a", names, [5])
    tiers.take_changes()
    tiers.request_added("b", names)
    tiers.find("b", 0, 4)
    tiers.blocks_allocated("b", [9], 4)
    if finished:
        # vLLM finishes the request first.
        assert not tiers.request_finished("b", sends=False)
    tiers.loads_ended(["b"], ["b"])
    (change,) = tiers.take_changes()
    assert (change.tier, change.stored, change.block_hashes) == (Tier.HOST, False, names)
    tiers.request_added("c", names)
    assert tiers.find("c", 0, 4) == 0


def test_a_preempted_request_stores_its_blocks_again() -> None:
    tiers, names = planner(), hashes(1)
    tiers.request_added("r", names)
    assert not tiers.request_preempted("r")
    tiers.step_planned("r", 4, [5], replaces=True)
    tiers.step_planned("r", 5, [6], replaces=False)
    assert len(plan_of(tiers).copies) == 1
    assert tiers.request_preempted("r")
    tiers.clear()
    tiers.step_planned("r", 4, [7], replaces=True)
    tiers.step_planned("r", 5, [], replaces=False)
    assert copies_of(plan_of(tiers)) == [("r", TierCopy(Tier.DEVICE, Tier.HOST, (7,), (0,)))]


def test_changes_have_vllms_hashes() -> None:
    tiers = planner(host=1)
    answered(tiers, "a", hashes(1), [5])
    answered(tiers, "b", hashes(2), [6])
    assert [(one.stored, one.block_hashes) for one in tiers.take_changes()] == [
        (True, hashes(1)),
        (False, hashes(1)),
        (True, hashes(2)),
    ]


def test_without_tiers_no_request_is_known() -> None:
    tiers = plan_tiers(TierSettings(), OverlapSettings(3), [group(STATE)])
    answered(tiers, "a", hashes(1), [5])
    assert tiers.find("a", 0, 4) == 0
    assert plan_of(tiers) == StepPlan()


def group(kind: GroupKind = TOKENS, page_bytes: int = 1 << 20) -> LayerGroup:
    return LayerGroup(0, "attention", kind, 1, BLOCK, "", ((0, "a"), (1, "b")), page_bytes)


@pytest.mark.parametrize(
    ("overlap", "groups", "words"),
    [
        (0, [group(), group(STATE)], "only full attention"),
        (1, [group()], "set overlap_layers or kv_host_gib to 0"),
        (0, [group(page_bytes=1 << 30)], "kv_host_gib is 1, but one block has 2 GiB"),
    ],
)
def test_models_and_settings_that_do_not_fit_are_refused(
    overlap: int, groups: list[LayerGroup], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_tiers(TierSettings(host_gib=1), OverlapSettings(overlap), groups)
