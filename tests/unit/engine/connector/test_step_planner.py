"""Step plans: token ranges that are sent, reservations, and requests that may run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_plan import StepPlan, TokenRange
from headrace_engine.connector.step_planner import StepPlanner
from headrace_engine.connector.transfers import ReceiveParams, ScheduledRequest, SendParams
from headrace_engine.vllm.settings import consume_params, params_with, read_params
from headrace_kv.layout import STATE, TOKENS, GroupKind, WorkerRef
from headrace_kv.messages import Reservation, TransferTarget

BLOCK = 32


def target_of(start: int, end: int, transfer_id: str = "x1") -> TransferTarget:
    return TransferTarget(transfer_id, WorkerRef("d0", "1"), "127.0.0.1:1", start, end, 1e12)


def group(index: int, kind: GroupKind, block_tokens: int) -> LayerGroup:
    return LayerGroup(index, f"{kind}.{index}", kind, 1, block_tokens, "", ((index, f"l{index}"),))


ATTENTION = (group(0, TOKENS, BLOCK),)
# As vLLM numbers a hybrid: its first groups are states.
HYBRID = (group(2, TOKENS, BLOCK), group(0, STATE, BLOCK), group(1, STATE, 1024))


def new_planner(groups: Sequence[LayerGroup] = ATTENTION) -> tuple[StepPlanner, list[Reservation]]:
    reserved: list[Reservation] = []
    return StepPlanner(groups, reserved.append), reserved


def step(
    request_id: str, computed: int, count: int, blocks: tuple[int, ...] = (), new: bool = False
) -> ScheduledRequest:
    return ScheduledRequest(request_id, computed, count, (blocks,) if blocks else (), new)


def admit_send(planner: StepPlanner, target: TransferTarget, request_id: str = "r") -> None:
    planner.blocks_allocated(request_id, SendParams(target), (), target.end_token, 0, never)


def computed(plan: StepPlan) -> list[tuple[int, int]]:
    """The token ranges that the plan sends."""
    return [(tokens.start_token, tokens.end_token) for tokens in plan.computed]


def never_waits(request_id: str) -> bool:
    return False


def never(token_id: int) -> None:
    raise AssertionError("no token is awaited")


def admit_receive(
    planner: StepPlanner,
    prompt: int,
    cached: int,
    add_token: list[int] | None = None,
    name: str = "r",
) -> None:
    """With `add_token`, the request awaits its first token, which is added to it."""
    transfer_id = "x1" if name == "r" else f"x-{name}"
    params = ReceiveParams(transfer_id, awaits_first_token=add_token is not None)
    missing = planner.missing_tokens(params, prompt, cached)
    add = never if add_token is None else add_token.append
    planner.blocks_allocated(name, params, (tuple(range(10, 60)),), prompt, missing, add)


def test_all_but_the_last_token_is_missing() -> None:
    planner, _ = new_planner()
    assert planner.missing_tokens(ReceiveParams("x1"), 129, 64) == 64
    assert planner.missing_tokens(ReceiveParams("x1"), 129, 128) == 0
    assert planner.missing_tokens(ReceiveParams("x1"), 1, 0) == 0
    assert planner.missing_tokens(ReceiveParams("x1", True), 128, 96) == 32
    assert planner.missing_tokens(None, 129, 0) == 0


@pytest.mark.parametrize(
    ("prompt", "cached", "add_token", "reservation"),
    [
        (130, 64, None, Reservation("x1", (12, 13, 14), 64, 129)),
        # A whole number of blocks.
        (129, 64, None, Reservation("x1", (12, 13), 64, 128)),
        # The whole prompt is missing where prefill makes the first token.
        (128, 96, [], Reservation("x1", (13,), 96, 128)),
    ],
)
def test_a_reservation_holds_the_blocks_of_the_missing_tokens(
    prompt: int, cached: int, add_token: list[int] | None, reservation: Reservation
) -> None:
    planner, reserved = new_planner()
    admit_receive(planner, prompt, cached, add_token)
    assert reserved == [reservation]


def test_a_cached_prompt_reserves_no_blocks_and_does_not_wait() -> None:
    planner, reserved = new_planner()
    admit_receive(planner, prompt=65, cached=64)
    assert reserved == [Reservation("x1", (), 64, 64)]
    planner.transfer_settled("x1", whole=True)
    assert planner.plan_step([], ()).received == []


def test_an_aborted_request_waits_for_its_transfer_to_settle() -> None:
    planner, _ = new_planner()
    admit_receive(planner, prompt=130, cached=0)
    assert planner.request_finished("r") is None
    assert planner.plan_step([], ()).finished_sends == {}
    planner.transfer_settled("x1", whole=True)
    assert planner.plan_step([], ()).received == ["r"]


def test_the_step_of_the_last_token_names_the_transfers_that_want_its_hidden_state() -> None:
    planner, _ = new_planner()
    admit_send(planner, target_of(0, 150), "r")
    admit_send(planner, replace(target_of(0, 150, "x2"), with_hidden_state=True), "s")
    first = planner.plan_step([step("r", 0, 70, (1,), new=True), step("s", 0, 70, (2,), True)], ())
    last = planner.plan_step([step("r", 70, 80), step("s", 70, 80)], ())
    assert (first.final, last.final) == ({}, {"s": "x2"})


def test_a_finished_send_keeps_its_blocks_until_the_ranks_are_quiet() -> None:
    planner, _ = new_planner()
    admit_send(planner, target_of(0, 40))
    planner.plan_step([step("r", 0, 40, (1, 2), new=True)], ())
    times = planner.request_finished("r")
    assert times is not None
    assert 0 < times.compute_start_unix_ns <= times.compute_end_unix_ns
    assert planner.plan_step([], ()).finished_sends == {"r": "x1"}
    assert planner.plan_step([], ()).finished_sends == {}


def test_a_send_that_never_ran_frees_its_blocks_at_once() -> None:
    planner, _ = new_planner()
    admit_send(planner, target_of(0, 40))
    assert planner.request_finished("r") is None
    assert planner.request_finished("unknown") is None


def test_a_preempted_send_fails_and_sends_nothing_when_it_is_resumed() -> None:
    planner, _ = new_planner()
    admit_send(planner, target_of(0, 100))
    planner.plan_step([step("r", 0, 40, (1, 2), new=True)], ())
    assert planner.plan_step([], ("r", "unknown")).preempted == ["x1"]
    plan = planner.plan_step([step("r", 0, 100, (5, 6, 7, 8), new=True)], ())
    assert (plan.opened, plan.computed) == ([], [])
    assert planner.request_finished("r") is None


@given(
    start_block=st.integers(0, 4),
    length=st.integers(1, 600),
    cached_block=st.integers(0, 18),
    chunks=st.lists(st.integers(1, 200), min_size=1, max_size=40),
)
def test_every_missing_token_is_planned_once(
    start_block: int, length: int, cached_block: int, chunks: list[int]
) -> None:
    start = start_block * BLOCK
    end = start + length
    computed = min(cached_block * BLOCK, (end - 1) // BLOCK * BLOCK)
    planner, _ = new_planner()
    admit_send(planner, target_of(start, end))
    covered = start
    held = 0
    first = True
    for wanted in [*chunks, end]:
        count = min(wanted, end - computed)
        if count <= 0:
            break
        needed = -(-(computed + count) // BLOCK)
        blocks = tuple(range(held, needed))
        held = max(held, needed)
        plan = planner.plan_step([step("r", computed, count, blocks, new=first)], ())
        assert (bool(plan.opened), plan.ready) == (first, [])
        for tokens in plan.computed:
            assert tokens.start_token == covered
            assert tokens.end_token % BLOCK == 0 or tokens.end_token == end
            assert len(tokens.block_ids[0]) * BLOCK >= tokens.end_token
            covered = tokens.end_token
        computed += count
        assert covered <= max(computed, start)
        first = False
    assert computed == end
    assert covered == end


def test_params_are_equal_after_conversion() -> None:
    target = replace(target_of(32, 77), ticket=bytes(range(256)))
    assert read_params(params_with(SendParams(target))) == SendParams(target)
    # vLLM passes them between its processes.
    assert read_params(json.loads(json.dumps(params_with(SendParams(target))))) == SendParams(
        target
    )
    assert read_params({}) is None
    # A request asks once: after a preemption, vLLM computes it here.
    params: dict[str, Any] = params_with(ReceiveParams("x1")) | {"other": 1}
    assert consume_params(params) == ReceiveParams("x1")
    assert params == {"other": 1}
    assert consume_params(params) is None


@pytest.mark.parametrize("token_first", [True, False])
def test_a_request_runs_with_both_its_kv_and_its_first_token(token_first: bool) -> None:
    planner, _ = new_planner()
    tokens: list[int] = []
    admit_receive(planner, prompt=130, cached=64, add_token=tokens)
    events = [
        partial(planner.first_token_received, "x1", 7),
        partial(planner.transfer_settled, "x1", whole=True),
    ]
    for event, received in zip(events if token_first else events[::-1], ([], ["r"]), strict=True):
        event()
        assert planner.plan_step((), ()).received == received
    assert tokens == [7]
    planner.first_token_received("x1", 8)
    assert planner.plan_step((), ()).received == []
    assert tokens == [7]


def test_a_whole_transfer_of_an_aborted_request_needs_no_first_token() -> None:
    planner, _ = new_planner()
    admit_receive(planner, prompt=130, cached=64, add_token=[])
    planner.transfer_settled("x1", whole=True)
    assert planner.plan_step((), ()).received == []
    assert planner.request_finished("r") is None
    assert planner.plan_step((), ()).received == ["r"]


def test_a_request_may_run_in_the_step_that_begins_after_its_kv() -> None:
    planner, _ = new_planner()
    admit_receive(planner, prompt=130, cached=64)
    admit_receive(planner, prompt=130, cached=64, name="s")
    assert planner.take_received(never_waits) == []
    for transfer_id in ("x1", "x-s"):
        planner.transfer_settled(transfer_id, whole=True)
    # During the scheduling of a step that computes: the next one takes it.
    assert planner.plan_step([step("other", 5, 1)], ()) == StepPlan()
    # `s` also waits for a load.
    assert planner.take_received(lambda name: name == "s") == ["r"]
    assert planner.plan_step([step("r", 129, 1)], ()) == StepPlan(received=["s"], fences=True)
    assert planner.take_received(never_waits) == []
    assert planner.plan_step([step("r", 130, 1)], ()) == StepPlan()


def test_a_model_of_states_alone_sends_once_at_the_end() -> None:
    planner, _ = new_planner((group(0, STATE, 1024),))
    admit_send(planner, target_of(0, 100))
    plan = planner.plan_step([ScheduledRequest("r", 0, 64, ((5,),), True)], ())
    assert (len(plan.opened), plan.computed) == (1, [])
    plan = planner.plan_step([ScheduledRequest("r", 64, 36, (), False)], ())
    assert plan.computed == [TokenRange("x1", 0, 100, ((5,),))]


@pytest.mark.parametrize("first_tokens", [64, 100])
def test_a_state_beyond_the_last_token_fails_its_transfer(first_tokens: int) -> None:
    planner, _ = new_planner(HYBRID)
    admit_send(planner, target_of(0, 100))
    blocks = ((0, 21, 22, 23), (31,), (1, 2, 3, 4))
    plan = planner.plan_step([ScheduledRequest("r", 0, first_tokens, blocks, True)], ())
    assert plan.overrun == []
    count = 101 - first_tokens
    plan = planner.plan_step([ScheduledRequest("r", first_tokens, count, (), False)], ())
    assert (plan.overrun, plan.computed) == (["x1"], [])
    plan = planner.plan_step([ScheduledRequest("r", 101, 1, (), False)], ())
    assert (plan.overrun, plan.computed) == ([], [])
    assert planner.request_finished("r") is not None


def test_attention_may_be_computed_beyond_the_tokens_that_are_sent() -> None:
    planner, _ = new_planner()
    admit_send(planner, target_of(0, 100))
    plan = planner.plan_step([step("r", 0, 101, (1, 2, 3, 4), new=True)], ())
    assert plan.overrun == []
    assert computed(plan) == [(0, 100)]


def test_planned_tokens_fill_whole_blocks_of_every_group() -> None:
    planner, _ = new_planner((group(0, TOKENS, 32), group(1, TOKENS, 48)))
    admit_send(planner, target_of(0, 500))
    plan = planner.plan_step(
        [ScheduledRequest("r", 0, 200, (tuple(range(7)), tuple(range(5))), True)], ()
    )
    assert computed(plan) == [(0, 192)]


def test_a_transfer_opens_before_its_request_runs_and_continues_with_it() -> None:
    planner, _ = new_planner()
    admit_send(planner, target_of(32, 150))
    asked: list[tuple[str, int]] = []

    def send(transfer_id: str, start_token: int) -> int:
        asked.append((transfer_id, start_token))
        return 128

    for request_id in ("r", "unknown", "r"):
        planner.send_before_running(request_id, send)
    assert asked == [("x1", 32)]
    plan = planner.plan_step([], ())
    assert ([target.transfer_id for target in plan.opened], plan.computed) == (["x1"], [])
    plan = planner.plan_step([step("r", 128, 22, (1, 2, 3, 4, 5), new=True)], ())
    assert (plan.opened, computed(plan)) == ([], [(128, 150)])
    times = planner.request_finished("r")
    assert times is not None
    assert times.cached_tokens == 128


def test_a_transfer_with_nothing_to_send_opens_when_its_request_runs() -> None:
    planner, _ = new_planner()
    admit_send(planner, target_of(32, 150))
    planner.send_before_running("r", lambda transfer_id, start_token: start_token)
    assert planner.plan_step([], ()).opened == []
    plan = planner.plan_step([step("r", 128, 22, (1, 2, 3, 4, 5), new=True)], ())
    assert (len(plan.opened), computed(plan)) == (1, [(32, 150)])


def test_a_request_that_ends_before_it_runs_frees_its_blocks_without_its_transfer() -> None:
    """vLLM frees them when their load ends. The service ends the transfer, which reads none of them."""
    planner, _ = new_planner()
    admit_send(planner, target_of(0, 150))
    planner.send_before_running("r", lambda transfer_id, start_token: 128)
    planner.plan_step([], ())
    assert planner.request_finished("r") is None
    assert planner.plan_step([], ()).finished_sends == {}
