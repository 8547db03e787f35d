"""What requests load from lower tiers and store there."""

from __future__ import annotations

import pytest

from headrace_common.callers.priority import Priority
from headrace_common.errors import ConfigError
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.pool_planner import PoolUse
from headrace_engine.connector.step_plan import StepPlan, TokenRange
from headrace_engine.connector.tier_planner import TierPlanner, plan_tiers
from headrace_kv.layout import STATE, TOKENS, GroupKind
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.promises import KeepTerms, Kept, PromiseCounts
from headrace_kv.tiers.tiers import LowerTiers, TierCopy, TierSettings

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


def answered(
    tiers: TierPlanner,
    request_id: str,
    names: list[bytes],
    block_ids: list[int],
    priority: Priority = Priority.NORMAL,
) -> None:
    """A request that computes all its blocks in one step, and ends."""
    tiers.request_added(request_id, names, priority)
    tiers.step_planned(request_id, 0, block_ids, replaces=True)
    tiers.request_finished(request_id, len(names) * BLOCK, sends=False)


def test_blocks_of_low_requests_are_evicted_first() -> None:
    tiers = planner(host=2)
    answered(tiers, "low", hashes(1), [10], Priority.LOW)
    answered(tiers, "normal", hashes(2), [11])
    # The low request used its block last.
    answered(tiers, "low again", hashes(1), [12], Priority.LOW)
    answered(tiers, "other", hashes(3), [13])
    gone = [one.block_hashes for one in tiers.take_changes() if not one.stored]
    assert gone == [hashes(1)]


def test_promised_blocks_stay_while_others_are_evicted() -> None:
    tiers, names = planner(host=12), hashes(1, 2, 3)
    tiers.request_added("r", names)
    tiers.step_planned("r", 0, [5, 6, 7], replaces=True)
    kept = tiers.keep("r", 2 * BLOCK + 1, KeepTerms("t", "owner", 60.0))
    assert kept == Kept(2 * BLOCK, Tier.HOST, 60.0)
    assert tiers.request_finished("r", 2 * BLOCK + 1, sends=False)
    # What is promised is copied, once.
    assert [copy.source_ids for _, copy in copies_of(plan_of(tiers))] == [(5, 6)]
    for number in range(100, 130):
        answered(tiers, str(number), hashes(number), [9])
    tiers.request_added("again", names)
    assert tiers.find("again", 0, 3 * BLOCK) == 2 * BLOCK
    assert tiers.promises.renew(KeepTerms("t", "another", 0.0)) is None
    assert tiers.promises.renew(KeepTerms("t", "owner", 0.0)) == Kept()
    tiers.request_finished("again", 0, sends=False)
    # The next step ends it.
    plan_of(tiers)
    assert tiers.promises.counts() == PromiseCounts(blocks={Tier.HOST: 0})


def test_promises_end_with_a_reset_and_with_a_failed_load() -> None:
    tiers, names = planner(host=12), hashes(1)
    for broken in (1, 2):
        tiers.request_added("r", names)
        tiers.step_planned("r", 0, [5], replaces=True)
        kept = tiers.keep("r", BLOCK, KeepTerms("t", "owner", 60.0))
        assert kept == Kept(BLOCK, Tier.HOST, 60.0)
        tiers.request_finished("r", BLOCK, sends=False)
        if broken == 1:
            tiers.request_added("b", names)
            tiers.find("b", 0, BLOCK)
            tiers.blocks_allocated("b", [9], BLOCK)
            tiers.loads_ended(["b"], ["b"])
        else:
            tiers.clear()
        assert tiers.promises.counts() == PromiseCounts(0, {Tier.HOST: 0}, broken)


def test_without_tiers_nothing_is_promised() -> None:
    tiers = TierPlanner(LowerTiers({}), 1)
    tiers.request_added("r", hashes(1))
    assert tiers.keep("r", 1, KeepTerms("t", "owner", 60.0)) is None


def test_tokens_that_never_ran_are_not_stored() -> None:
    tiers = planner()
    tiers.request_added("r", hashes(1, 2))
    assert not tiers.request_finished("r", 0, sends=False)
    assert plan_of(tiers).copies == []


def test_an_ended_request_that_loads_leaves_its_blocks_to_the_end_of_the_load() -> None:
    tiers, names = planner(), hashes(1)
    answered(tiers, "a", names, [5])
    tiers.request_added("b", names)
    tiers.find("b", 0, 4)
    tiers.blocks_allocated("b", [9], 4)
    plan_of(tiers)
    assert not tiers.request_finished("b", 4, sends=False)
    assert plan_of(tiers).finished_stores == {}


def test_a_hit_that_vllm_does_not_use_is_released() -> None:
    tiers, names = planner(host=1), hashes(1)
    answered(tiers, "a", names, [5])
    tiers.request_added("b", names)
    assert tiers.find("b", 0, 4) == 4
    assert tiers.blocks_allocated("b", [9], 0) == 0
    tiers.request_added("c", names)
    tiers.find("c", 0, 4)
    tiers.request_finished("c", 4, sends=False)
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
        assert not tiers.request_finished("b", 4, sends=False)
    tiers.loads_ended(["b"], ["b"])
    (change,) = tiers.take_changes()
    assert (change.tier, change.stored, change.block_hashes) == (Tier.HOST, False, names)
    tiers.request_added("c", names)
    assert tiers.find("c", 0, 4) == 0


def test_a_failed_load_keeps_what_was_stored_in_its_place_meanwhile() -> None:
    tiers, names, others = planner(host=1), hashes(1), hashes(2)
    answered(tiers, "a", names, [5])
    tiers.request_added("b", names)
    tiers.find("b", 0, 4)
    tiers.blocks_allocated("b", [9], 4)
    answered(tiers, "c", others, [6])
    tiers.take_changes()
    tiers.loads_ended(["b"], ["b"])
    assert tiers.take_changes() == []
    tiers.request_added("d", others)
    assert tiers.find("d", 0, 4) == 4


def test_a_preempted_request_stores_its_blocks_again() -> None:
    tiers, names = planner(), hashes(1)
    tiers.request_added("r", names)
    assert not tiers.request_preempted("r")
    tiers.step_planned("r", 0, [5], replaces=True)
    tiers.step_planned("r", 4, [6], replaces=False)
    assert len(plan_of(tiers).copies) == 1
    assert tiers.request_preempted("r")
    tiers.clear()
    tiers.step_planned("r", 0, [7], replaces=True)
    tiers.step_planned("r", 4, [], replaces=False)
    assert copies_of(plan_of(tiers)) == [("r", TierCopy(Tier.DEVICE, Tier.HOST, (7,), (0,)))]


def test_without_tiers_no_request_is_known() -> None:
    tiers = plan_tiers(TierSettings(), [group(STATE)])
    answered(tiers, "a", hashes(1), [5])
    assert tiers.find("a", 0, 4) == 0
    assert plan_of(tiers) == StepPlan()


def group(kind: GroupKind = TOKENS, page_bytes: int = 1 << 20) -> LayerGroup:
    return LayerGroup(0, "attention", kind, 1, BLOCK, "", ((0, "a"), (1, "b")), page_bytes)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([group(), group(STATE)], "only full attention"),
        ([group(page_bytes=1 << 30)], "kv_host_gib is 1, but one block has 2 GiB"),
    ],
)
def test_models_and_settings_that_do_not_fit_are_refused(
    groups: list[LayerGroup], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_tiers(TierSettings(host_gib=1), groups)


def stored(names: list[bytes], host: int = 8, ranks: int = 1) -> TierPlanner:
    """A planner that sends from main memory, which has the blocks `names`."""
    tiers = TierPlanner(LowerTiers({Tier.HOST: host}), BLOCK, PoolUse(ranks), sends_from_host=True)
    answered(tiers, "first", names, list(range(len(names))))
    plan_of(tiers)
    return tiers


def loading(
    tiers: TierPlanner, names: list[bytes], computed_tokens: int = 0, request_id: str = "b"
) -> None:
    """A request loads all that it lacks of its blocks."""
    tiers.request_added(request_id, names)
    end = len(names) * BLOCK
    assert tiers.find(request_id, computed_tokens, end) == end - computed_tokens
    tiers.blocks_allocated(request_id, list(range(20, 20 + len(names))), end - computed_tokens)


def test_blocks_that_decode_has_are_not_sent_from_main_memory() -> None:
    names = hashes(1, 2, 3)
    tiers = stored(names)
    loading(tiers, names)
    assert tiers.send_from_host("b", "x1", 2 * BLOCK) == 3 * BLOCK
    (send,) = plan_of(tiers).host_sends
    assert send.tokens == TokenRange("x1", 8, 12, ((0, 0, 2),))
    assert tiers.send_from_host("b", "x1", 3 * BLOCK) == 3 * BLOCK
    assert plan_of(tiers).host_sends == []


def test_only_the_first_blocks_that_main_memory_has_are_sent_from_there() -> None:
    names = hashes(1, 2, 3)
    tiers = TierPlanner(
        LowerTiers({Tier.HOST: 2, Tier.DISK: 8}), BLOCK, PoolUse(), sends_from_host=True
    )
    answered(tiers, "first", names[:2], [1, 2])
    # The second block goes to the disk.
    answered(tiers, "second", hashes(8), [3])
    loading(tiers, names[:2])
    assert tiers.send_from_host("b", "x1", 0) == BLOCK
    assert tiers.send_from_host("unknown", "x2", 0) == 0
    answered(tiers, "third", hashes(1, 9), [5, 6])
    loading(tiers, names[:1], request_id="c")
    assert planner().send_from_host("c", "x3", 0) == 0


def test_sent_blocks_stay_in_main_memory_until_no_rank_reads_them() -> None:
    names = hashes(1, 2)
    tiers = stored(names, host=2, ranks=2)
    loading(tiers, names)
    assert tiers.send_from_host("b", "x1", 0) == 2 * BLOCK
    plan_of(tiers)
    for ended in ([], [1], [7]):
        tiers.host_sends.ended(ended)
        answered(tiers, f"other{ended}", hashes(8, 9), [3, 4])
        assert plan_of(tiers).copies == []
    tiers.host_sends.ended([1])
    answered(tiers, "last", hashes(8, 9), [3, 4])
    assert len(plan_of(tiers).copies) == 1


def test_a_reset_forgets_blocks_that_are_being_sent() -> None:
    names = hashes(1, 2)
    tiers = stored(names, host=2)
    loading(tiers, names)
    tiers.send_from_host("b", "x1", 0)
    tiers.take_changes()
    tiers.clear()
    (change,) = tiers.take_changes()
    assert (change.tier, change.stored, change.block_hashes) == (Tier.HOST, False, names)
    tiers.request_added("c", names)
    assert tiers.find("c", 0, 2 * BLOCK) == 0
    # They are not overwritten before they are sent.
    answered(tiers, "d", hashes(8), [3])
    assert plan_of(tiers).copies[1:] == []
    tiers.host_sends.ended([1])
    answered(tiers, "e", hashes(8), [3])
    assert [one.request_id for one in plan_of(tiers).copies] == ["e"]
