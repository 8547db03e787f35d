"""KV of a prompt's first tokens on its way from decode to prefill: plans of both schedulers, and held blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.vllm.scheduler.step_planner import StepPlanner
from headrace_engine.vllm.scheduler.transfers import ScheduledRequest
from headrace_engine.vllm.settings import (
    PrefixParams,
    read_params,
    read_prefix,
    receive_params,
    send_params,
)
from headrace_engine.vllm.step_plan import StepPlan, TokenRange
from headrace_kv.handoff.messages import Reservation, TransferTarget
from headrace_kv.layout.layout import TOKENS
from tests.unit.engine.vllm.scheduler.test_step_planner import (
    ATTENTION,
    BLOCK,
    HYBRID,
    group,
    never,
    target_of,
)

BLOCK_IDS = tuple(range(10, 20))
WINDOWED = (group(0, TOKENS, BLOCK), replace(group(1, TOKENS, BLOCK), window_tokens=64))


@dataclass(slots=True)
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class Pool:
    """Blocks with their references, like vLLM's block pool. Block 0 is the null block."""

    def __init__(self) -> None:
        self.blocks = [Block(number, is_null=number == 0) for number in range(64)]

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1

    def held(self) -> list[int]:
        assert all(block.ref_cnt in (0, 1) for block in self.blocks)
        return [block.block_id for block in self.blocks if block.ref_cnt]


def new_planner(groups: Any = ATTENTION) -> tuple[StepPlanner, Pool, list[Reservation]]:
    reserved: list[Reservation] = []
    planner, pool = StepPlanner(groups, reserved.append), Pool()
    manager: Any = SimpleNamespace(block_pool=pool)
    planner.holds.bind(manager)
    return planner, pool, reserved


def computes(request_id: str = "other") -> ScheduledRequest:
    return ScheduledRequest(request_id, 0, 1, (), False)


# Prefill: receives.


def fetch(
    planner: StepPlanner, cached: int, *, end_token: int = 128, least_tokens: int = 32
) -> None:
    """A prompt of 150 tokens gets blocks. Prefill has `cached` tokens, and decode those before `end_token`."""
    params = send_params(target_of(end_token, 150), PrefixParams(end_token, least_tokens))
    missing = planner.missing_tokens(params, 150, cached)
    planner.blocks_allocated("r", params, (BLOCK_IDS,), 150, missing, never)
    # After a failure, vLLM asks again.
    assert planner.missing_tokens(params, 150, cached) == 0


def first_step(planner: StepPlanner, computed: int) -> StepPlan:
    request = ScheduledRequest("r", computed, 150 - computed, (BLOCK_IDS,), True)
    return planner.plan_step([request], ())


def test_a_prompt_runs_when_its_prefix_has_come_and_sends_the_rest() -> None:
    planner, pool, _ = new_planner()
    fetch(planner, cached=64)
    assert planner.plan_step((), ()).received == []
    planner.transfer_settled("x1", whole=True)
    plan = planner.plan_step((), ())
    assert (plan.received, plan.failed) == (["r"], [])
    plan = first_step(planner, computed=128)
    assert plan.computed == [TokenRange("x1", 128, 150, (BLOCK_IDS,))]
    times = planner.request_finished("r")
    assert times is not None
    assert (times.cached_tokens, times.fetched_tokens) == (64, 64)
    assert pool.held() == []


def test_a_prompt_is_computed_when_its_prefix_has_failed() -> None:
    planner, pool, _ = new_planner()
    fetch(planner, cached=64)
    planner.transfer_settled("x1", whole=False)
    # It has settled already, so no blocks are held.
    planner.transfer_late("x1")
    plan = planner.plan_step((), ())
    assert (plan.received, plan.failed) == ([], ["r"])
    assert pool.held() == []
    assert planner.plan_step((), ()).failed == []
    assert first_step(planner, computed=64).computed == [TokenRange("x1", 128, 150, (BLOCK_IDS,))]
    times = planner.request_finished("r")
    assert times is not None
    assert (times.cached_tokens, times.fetched_tokens) == (64, 0)


@pytest.mark.parametrize("whole", [True, False])
def test_the_blocks_of_a_late_prefix_are_held_until_nothing_writes_them(whole: bool) -> None:
    """I1."""
    planner, pool, _ = new_planner()
    fetch(planner, cached=64)
    planner.transfer_late("x1")
    plan = planner.plan_step((), ())
    assert (plan.received, plan.failed) == ([], ["r"])
    assert pool.held() == list(BLOCK_IDS[2:4])
    first_step(planner, computed=64)
    assert planner.request_finished("r") is not None
    planner.plan_step((), ())
    assert pool.held() == list(BLOCK_IDS[2:4])
    planner.transfer_settled("x1", whole=whole)
    plan = planner.plan_step((), ())
    assert (plan.received, plan.failed, pool.held()) == ([], [], [])


def test_an_aborted_prompt_keeps_its_blocks_until_its_fetch_has_settled() -> None:
    planner, pool, _ = new_planner()
    fetch(planner, cached=64)
    assert planner.request_finished("r") is None
    plan = planner.plan_step((), ())
    assert (plan.received, plan.failed, plan.finished_sends) == ([], [], {})
    planner.transfer_settled("x1", whole=False)
    # vLLM then frees them.
    assert planner.plan_step((), ()).failed == ["r"]
    assert pool.held() == []


def test_the_null_block_of_a_window_is_not_held() -> None:
    planner, pool, _ = new_planner(WINDOWED)
    params = send_params(target_of(128, 150), PrefixParams(128, 1))
    blocks = (BLOCK_IDS, (0, 0, 32, 33, 34))
    planner.blocks_allocated("r", params, blocks, 150, 128, never)
    planner.transfer_late("x1")
    planner.plan_step((), ())
    assert pool.held() == [*BLOCK_IDS[:4], 32, 33]


def test_params_of_a_prefix_are_equal_after_conversion() -> None:
    target, prefix = target_of(64, 77), PrefixParams(64, 32)
    assert read_prefix(send_params(target, prefix)) == prefix
    assert read_params(send_params(target, prefix)) == target
    assert read_prefix(send_params(target)) is None
    assert read_prefix(receive_params("x1")) is read_prefix({}) is read_prefix(None) is None


# Decode: sends.


def wait_for_kv(
    planner: StepPlanner, cached: int, *, blocks: Any = (BLOCK_IDS,), loading: int = 0
) -> None:
    """A request with a prompt of 200 tokens waits for its KV, and has `cached` tokens."""
    params = receive_params("x1")
    planner.blocks_allocated("r", params, blocks, 200, 199 - cached, never, loading)


def wanted(end_token: int, start_token: int = 32) -> TransferTarget:
    return replace(target_of(start_token, end_token), handoff_endpoint="127.0.0.1:9")


def test_a_cached_prefix_is_sent_once_and_held_until_the_ranks_are_quiet() -> None:
    """I2, also when the request has ended."""
    planner, pool, _ = new_planner()
    wait_for_kv(planner, cached=96)
    planner.prefix_requested(wanted(96))
    plan = planner.plan_step((), ())
    (send,) = plan.prefixes
    assert send.target == wanted(96)
    assert send.tokens == TokenRange("x1", 32, 96, (BLOCK_IDS[:3],))
    assert pool.held() == list(BLOCK_IDS[:3])
    assert plan.refused_prefixes == []
    assert planner.request_finished("r") is None
    for _ in range(2):
        planner.transfer_settled("x1", whole=False)
        assert planner.plan_step((), ()).prefixes == []
        assert pool.held() == list(BLOCK_IDS[:3])
    planner.prefix_sent("x1")
    planner.plan_step((), ())
    assert pool.held() == []


def test_a_prefix_is_not_sent_in_the_step_that_may_compute_it() -> None:
    """vLLM takes blocks for cached when it plans to fill them."""
    planner, pool, _ = new_planner()
    wait_for_kv(planner, cached=96)
    planner.prefix_requested(wanted(96))
    plan = planner.plan_step([computes()], ())
    assert (plan.prefixes, plan.refused_prefixes, pool.held()) == ([], [], [])
    assert len(planner.plan_step([computes()], ()).prefixes) == 1


def test_a_prefix_that_is_stopped_before_it_is_planned_holds_no_blocks() -> None:
    planner, pool, _ = new_planner()
    wait_for_kv(planner, cached=96)
    planner.prefix_requested(wanted(96))
    planner.plan_step([computes()], ())
    planner.prefix_sent("x1")
    assert planner.plan_step((), ()).prefixes != []
    assert pool.held() == []
    other, pool, _ = new_planner()
    wait_for_kv(other, cached=96)
    other.prefix_requested(wanted(96))
    other.prefix_sent("x1")
    # The ranks know that it was stopped, and do not open it.
    assert len(other.plan_step((), ()).prefixes) == 1
    assert pool.held() == []
    third, pool, _ = new_planner()
    wait_for_kv(third, cached=96)
    third.prefix_requested(wanted(96))
    third.prefix_sent("x1")
    for _ in range(2):
        assert third.plan_step([computes()], ()).prefixes == []
    assert pool.held() == []


def test_a_prefix_of_a_window_is_sent_whole_or_not_at_all() -> None:
    """vLLM has freed the blocks before the window of the last cached token."""
    for end_token, refused in ((96, ["x1"]), (128, [])):
        planner, pool, _ = new_planner(WINDOWED)
        wait_for_kv(planner, cached=128, blocks=(BLOCK_IDS, (0, 0, 32, 33, 34, 35, 36)))
        planner.prefix_requested(wanted(end_token))
        plan = planner.plan_step((), ())
        assert plan.refused_prefixes == refused
        if not refused:
            (send,) = plan.prefixes
            assert send.tokens.block_ids == (BLOCK_IDS[:4], (0, 0, 32, 33))
            assert pool.held() == [*BLOCK_IDS[:4], 32, 33]


def test_a_model_with_states_sends_no_prefix() -> None:
    planner, _, _ = new_planner(HYBRID)
    blocks = ((0, 0, 0, 41), (7,), BLOCK_IDS)
    planner.blocks_allocated("r", receive_params("x1"), blocks, 130, 65, never)
    planner.prefix_requested(wanted(64))
    assert planner.plan_step((), ()).refused_prefixes == ["x1"]
