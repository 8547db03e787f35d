"""KV of a prompt's first tokens on its way from decode to prefill: plans of both schedulers, and held blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from headrace_engine.connector.step_plan import StepPlan, TokenRange
from headrace_engine.connector.step_planner import StepPlanner
from headrace_engine.connector.transfers import (
    PrefixParams,
    ReceiveParams,
    ScheduledRequest,
    SendParams,
)
from headrace_engine.vllm.scheduler.connector_scheduler import VllmPoolBlocks
from headrace_engine.vllm.settings import params_with, read_params, waits_for_kv
from headrace_kv.layout import TOKENS
from headrace_kv.messages import Reservation
from tests.unit.engine.connector.test_step_planner import (
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
    planner.holds.bind(VllmPoolBlocks(cast("Any", pool)))
    return planner, pool, reserved


# Prefill: receives.


def fetch(
    planner: StepPlanner, cached: int, *, end_token: int = 128, least_tokens: int = 32
) -> None:
    """A prompt of 150 tokens gets blocks. Prefill has `cached` tokens, and decode those before `end_token`."""
    params = SendParams(target_of(end_token, 150), PrefixParams("p1", end_token, least_tokens))
    missing = planner.missing_tokens(params, 150, cached)
    planner.blocks_allocated("r", params, (BLOCK_IDS,), 150, missing, never)


def first_step(planner: StepPlanner, computed: int) -> StepPlan:
    request = ScheduledRequest("r", computed, 150 - computed, (BLOCK_IDS,), True)
    return planner.plan_step([request], ())


def test_a_prompt_runs_when_its_prefix_has_come_and_sends_the_rest() -> None:
    planner, pool, _ = new_planner()
    fetch(planner, cached=64)
    assert planner.plan_step((), ()).received == []
    planner.transfer_settled("p1", whole=True)
    plan = planner.plan_step((), ())
    assert (plan.received, plan.failed) == (["r"], [])
    plan = first_step(planner, computed=128)
    assert plan.computed == [TokenRange("x1", 128, 150, (BLOCK_IDS,))]
    times = planner.request_finished("r")
    assert times is not None
    assert (times.cached_tokens, times.fetched_tokens) == (64, 64)
    assert pool.held() == []


def test_a_prompt_runs_with_the_first_layer_of_its_prefix_and_what_came_stays_cached() -> None:
    planner, pool, _ = new_planner()
    fetch(planner, cached=64)
    planner.layers_arrived("p1")
    assert planner.plan_step((), ()).received == ["r"]
    plan = first_step(planner, computed=128)
    assert (plan.computed, plan.awaited) == ([TokenRange("x1", 128, 150, (BLOCK_IDS,))], ["p1"])
    # The last layer has come within the step, after which the prompt ends at once.
    planner.transfer_settled("p1", whole=True)
    assert planner.request_leaves("r") is None
    times = planner.request_finished("r")
    assert times is not None
    assert (times.cached_tokens, times.fetched_tokens) == (64, 64)
    assert planner.plan_step((), ()).completed == []
    assert pool.held() == []


def test_a_prompt_is_computed_when_its_prefix_has_failed() -> None:
    planner, pool, _ = new_planner()
    fetch(planner, cached=64)
    planner.transfer_settled("p1", whole=False)
    # It has settled already, so no blocks are held.
    planner.transfer_late("p1")
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
    planner.transfer_late("p1")
    plan = planner.plan_step((), ())
    assert (plan.received, plan.failed) == ([], ["r"])
    assert pool.held() == list(BLOCK_IDS[2:4])
    first_step(planner, computed=64)
    assert planner.request_finished("r") is not None
    planner.plan_step((), ())
    assert pool.held() == list(BLOCK_IDS[2:4])
    planner.transfer_settled("p1", whole=whole)
    plan = planner.plan_step((), ())
    assert (plan.received, plan.failed, pool.held()) == ([], [], [])


def test_an_aborted_prompt_keeps_its_blocks_until_its_fetch_has_settled() -> None:
    planner, pool, _ = new_planner()
    fetch(planner, cached=64)
    assert planner.request_finished("r") is None
    plan = planner.plan_step((), ())
    assert (plan.received, plan.failed, plan.finished_sends) == ([], [], {})
    planner.transfer_settled("p1", whole=False)
    # vLLM then frees them.
    assert planner.plan_step((), ()).failed == ["r"]
    assert pool.held() == []


def test_the_null_block_of_a_window_is_not_held() -> None:
    planner, pool, _ = new_planner(WINDOWED)
    params = SendParams(target_of(128, 150), PrefixParams("p1", 128, 1))
    blocks = (BLOCK_IDS, (0, 0, 32, 33, 34))
    planner.blocks_allocated("r", params, blocks, 150, 128, never)
    planner.transfer_late("p1")
    planner.plan_step((), ())
    assert pool.held() == [*BLOCK_IDS[:4], 32, 33]


def test_params_of_a_prefix_are_equal_after_conversion() -> None:
    target, prefix = target_of(64, 77), PrefixParams("p1", 64, 32)
    assert read_params(params_with(SendParams(target, prefix))) == SendParams(target, prefix)
    cached = params_with(SendParams(target, cached_only=True))
    assert read_params(cached) == SendParams(target, cached_only=True)
    # The scheduler must not hold it back behind prompts.
    assert waits_for_kv(cached)
    assert not waits_for_kv(params_with(SendParams(target, prefix)))


# Decode: sends.


def send_cached(
    groups: Any = ATTENTION,
    *,
    computed: int = 96,
    blocks: Any = (BLOCK_IDS[:4],),
    written: int = BLOCK_IDS[4],
) -> tuple[StepPlanner, StepPlan]:
    """A request for the first 96 tokens, of which prefill lacks 64, and its first step. `computed` are cached.

    The step also writes the block `written` of another request.
    """
    planner, _, reserved = new_planner(groups)
    params = SendParams(target_of(32, 96), cached_only=True)
    assert planner.missing_tokens(params, 97, computed) == 0
    planner.blocks_allocated("r", params, blocks, 97, 0, never)
    assert reserved == []
    request = ScheduledRequest("r", computed, 97 - computed, blocks, True)
    other = ScheduledRequest("other", 0, 32, (), False)
    return planner, planner.plan_step([request, other], (), lambda one: [written])


def test_a_cached_prefix_is_sent_before_the_step_and_its_blocks_stay_until_the_ranks_are_quiet() -> (
    None
):
    """I2. The layer hooks may not run."""
    planner, plan = send_cached()
    assert plan.opened == [target_of(32, 96)]
    assert plan.ready == [TokenRange("x1", 32, 96, (BLOCK_IDS[:4],))]
    assert (plan.computed, plan.refused) == ([], [])
    assert planner.request_finished("r") is not None
    assert planner.plan_step((), ()).finished_sends == {"r": "x1"}


def test_a_prefix_that_is_not_cached_any_more_is_refused() -> None:
    planner, plan = send_cached(computed=64)
    assert (plan.opened, plan.ready, plan.computed, plan.refused) == ([], [], [], ["x1"])
    assert planner.request_finished("r") is not None
    assert planner.plan_step((), ()).finished_sends == {"r": "x1"}


def test_a_prefix_that_another_request_computes_in_the_step_is_refused() -> None:
    """vLLM finds blocks in its cache as soon as a step with them is planned."""
    _, plan = send_cached(written=BLOCK_IDS[1])
    assert (plan.opened, plan.ready, plan.computed, plan.refused) == ([], [], [], ["x1"])


def test_a_prefix_of_a_window_is_sent_from_the_blocks_of_its_own_request() -> None:
    """The blocks before the window of its last token are gone."""
    blocks = (BLOCK_IDS[:4], (0, 32, 33, 34))
    _, plan = send_cached(WINDOWED, blocks=blocks)
    assert plan.ready == [TokenRange("x1", 32, 96, blocks)]


def test_a_model_with_states_sends_no_prefix() -> None:
    _, plan = send_cached(HYBRID, blocks=((0, 0, 0, 41), (7,), BLOCK_IDS[:4]))
    assert (plan.opened, plan.refused) == ([], ["x1"])


# Answers that compute beside prefill: receives.


def begin(planner: StepPlanner) -> None:
    """A prompt of 150 tokens, of which this engine computes those from 128 on, runs with its first layer."""
    params = ReceiveParams("p1", computes_from=128)
    missing = planner.missing_tokens(params, 150, 64)
    assert missing == 64
    planner.blocks_allocated("r", params, (BLOCK_IDS,), 150, missing, never)
    planner.layers_arrived("p1")
    plan = planner.plan_step((), ())
    assert (plan.received, plan.begun, plan.awaited) == (["r"], ["r"], [])
    planner.layers_arrived("p1")


@pytest.mark.parametrize("whole", [True, False])
def test_steps_wait_for_a_transfer_until_it_has_settled(whole: bool) -> None:
    planner, pool, _ = new_planner()
    begin(planner)
    plan = first_step(planner, computed=128)
    assert (plan.received, plan.awaited) == ([], ["p1"])
    planner.transfer_settled("p1", whole=whole)
    planner.plan_step((), ())
    assert first_step(planner, computed=140).awaited == []
    # Until the request of a failed transfer leaves, its blocks have wrong KV.
    assert bool(planner.partial.receives) is not whole
    assert planner.partial.leave("r") == (None if whole else 64)
    assert not planner.partial.receives
    assert pool.held() == []


@pytest.mark.parametrize("whole", [True, False])
def test_the_blocks_of_a_request_that_leaves_are_held_until_nothing_writes_them(
    whole: bool,
) -> None:
    """I1."""
    planner, pool, _ = new_planner()
    begin(planner)
    assert planner.partial.leave("other") is None
    assert planner.partial.leave("r") == 64
    assert pool.held() == list(BLOCK_IDS[2:4])
    planner.transfer_settled("p1", whole=whole)
    assert planner.plan_step((), ()).completed == []
    assert pool.held() == []


def test_a_request_that_has_ended_does_not_begin() -> None:
    planner, _, _ = new_planner()
    params = ReceiveParams("p1", computes_from=128)
    planner.blocks_allocated("r", params, (BLOCK_IDS,), 150, 64, never)
    planner.request_finished("r")
    planner.layers_arrived("p1")
    assert planner.plan_step((), ()).received == []
    assert not planner.partial.receives
