"""The scheduler's side: spans, reservations, and who may go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler, ScheduledRequest
from headrace_engine.vllm.settings import incoming_params, outgoing_params, read_params
from headrace_engine.vllm.step.groups import LayerGroup
from headrace_kv.handoff.messages import Reservation, TransferTarget
from headrace_kv.layout.layout import STATE, TOKENS, GroupKind, WorkerRef

BLOCK = 32


def target_of(start: int, end: int, transfer_id: str = "x1") -> TransferTarget:
    return TransferTarget(transfer_id, WorkerRef("d0", "1"), "127.0.0.1:1", start, end, 1e12)


def group(index: int, kind: GroupKind, block_tokens: int) -> LayerGroup:
    return LayerGroup(index, f"{kind}.{index}", kind, 1, block_tokens, "", ((index, f"l{index}"),))


ATTENTION = (group(0, TOKENS, BLOCK),)
# As vLLM numbers a hybrid: its first groups are states.
HYBRID = (group(2, TOKENS, BLOCK), group(0, STATE, BLOCK), group(1, STATE, 1024))


def side(groups: Sequence[LayerGroup] = ATTENTION) -> tuple[ConnectorScheduler, list[Reservation]]:
    reserved: list[Reservation] = []
    return ConnectorScheduler(groups, reserved.append), reserved


def step(
    request_id: str, computed: int, count: int, blocks: tuple[int, ...] = (), new: bool = False
) -> ScheduledRequest:
    return ScheduledRequest(request_id, computed, count, (blocks,) if blocks else (), new)


def admit_send(
    scheduler: ConnectorScheduler, target: TransferTarget, request_id: str = "r"
) -> None:
    scheduler.allocated(request_id, outgoing_params(target), (), target.end_token, 0, never)


def never(token_id: int) -> None:
    raise AssertionError("nothing goes on here")


def admit_receive(
    scheduler: ConnectorScheduler, prompt: int, cached: int, go_on: list[int] | None = None
) -> None:
    """With `go_on`, the request awaits its first token, which is added to it."""
    params = incoming_params("x1", awaits_first_token=go_on is not None)
    missing = scheduler.missing_tokens(params, prompt, cached)
    told = never if go_on is None else go_on.append
    scheduler.allocated("r", params, (tuple(range(10, 60)),), prompt, missing, told)


def test_all_but_the_last_token_is_missing() -> None:
    scheduler, _ = side()
    assert scheduler.missing_tokens(incoming_params("x1"), 129, 64) == 64
    assert scheduler.missing_tokens(incoming_params("x1"), 129, 128) == 0
    assert scheduler.missing_tokens(incoming_params("x1"), 1, 0) == 0
    assert scheduler.missing_tokens(None, 129, 0) == 0
    assert scheduler.missing_tokens({"other": 1}, 129, 0) == 0


def test_a_reservation_holds_the_blocks_of_the_missing_tokens() -> None:
    scheduler, reserved = side()
    admit_receive(scheduler, prompt=130, cached=64)
    assert reserved == [Reservation("x1", (12, 13, 14), 64, 129)]


def test_a_whole_number_of_blocks_takes_no_block_more() -> None:
    scheduler, reserved = side()
    admit_receive(scheduler, prompt=129, cached=64)
    assert reserved == [Reservation("x1", (12, 13), 64, 128)]


def test_nothing_missing_reserves_nothing_and_waits_for_nobody() -> None:
    scheduler, reserved = side()
    admit_receive(scheduler, prompt=65, cached=64)
    assert reserved == [Reservation("x1", (), 64, 64)]
    scheduler.settle("x1", whole=True)
    assert scheduler.plan_step([], ()).received == []


def test_a_request_is_asked_for_its_cache_once() -> None:
    scheduler, _ = side()
    params: dict[str, Any] = incoming_params("x1") | {"other": 1}
    scheduler.allocated("r", params, (tuple(range(9)),), 129, 128, never)
    assert scheduler.missing_tokens(params, 129, 0) == 0
    assert params == {"other": 1}


def test_each_receiver_is_reported_once_and_only_when_known() -> None:
    scheduler, _ = side()
    admit_receive(scheduler, prompt=130, cached=0)
    scheduler.settle("unknown", whole=True)
    scheduler.settle("x1", whole=True)
    scheduler.settle("x1", whole=False)
    plan = scheduler.plan_step([], ())
    assert (plan.received, plan.failed) == (["r"], [])
    plan = scheduler.plan_step([], ())
    assert (plan.received, plan.failed) == ([], [])


def test_a_released_transfer_fails_its_request() -> None:
    scheduler, _ = side()
    admit_receive(scheduler, prompt=130, cached=0)
    scheduler.settle("x1", whole=False)
    plan = scheduler.plan_step([], ())
    assert (plan.received, plan.failed) == ([], ["r"])


def test_an_aborted_receiver_waits_for_its_transfer() -> None:
    scheduler, _ = side()
    admit_receive(scheduler, prompt=130, cached=0)
    assert scheduler.finished("r") is None
    assert scheduler.plan_step([], ()).finished_sends == {}
    scheduler.settle("x1", whole=True)
    assert scheduler.plan_step([], ()).received == ["r"]


def test_chunks_hand_over_whole_blocks_until_the_last() -> None:
    scheduler, _ = side()
    admit_send(scheduler, target_of(0, 150))
    first = scheduler.plan_step([step("r", 0, 70, (1, 2, 3), new=True)], ())
    assert [target.transfer_id for target in first.opened] == ["x1"]
    assert [(s.start_token, s.end_token, s.block_ids[0]) for s in first.computed] == [
        (0, 64, (1, 2, 3))
    ]
    second = scheduler.plan_step([step("r", 70, 20)], ())
    assert (second.opened, second.computed) == ([], [])
    third = scheduler.plan_step([step("r", 90, 60, (4, 5))], ())
    assert [(s.start_token, s.end_token, s.block_ids[0]) for s in third.computed] == [
        (64, 150, (1, 2, 3, 4, 5))
    ]


def test_the_step_of_the_last_token_is_told_where_its_logits_are_wanted() -> None:
    scheduler, _ = side()
    admit_send(scheduler, target_of(0, 150), "r")
    admit_send(scheduler, replace(target_of(0, 150, "x2"), with_logits=True), "s")
    first = scheduler.plan_step(
        [step("r", 0, 70, (1,), new=True), step("s", 0, 70, (2,), True)], ()
    )
    last = scheduler.plan_step([step("r", 70, 80), step("s", 70, 80)], ())
    assert (first.final, last.final) == ([], ["x2"])


def test_a_cached_prefix_is_handed_over_with_the_step_from_where_decode_lacks_it() -> None:
    scheduler, _ = side()
    admit_send(scheduler, target_of(32, 150))
    plan = scheduler.plan_step([step("r", 128, 22, (1, 2, 3, 4, 5), new=True)], ())
    assert plan.ready == []
    assert [(s.start_token, s.end_token) for s in plan.computed] == [(32, 150)]
    times = scheduler.finished("r")
    assert times is not None
    assert times.cached_tokens == 128


def test_tokens_that_decode_has_are_not_handed_over() -> None:
    scheduler, _ = side()
    admit_send(scheduler, target_of(128, 150))
    plan = scheduler.plan_step([step("r", 0, 100, (1, 2, 3, 4), new=True)], ())
    assert plan.opened
    assert plan.computed == []
    plan = scheduler.plan_step([step("r", 100, 50, (5,))], ())
    assert [(s.start_token, s.end_token) for s in plan.computed] == [(128, 150)]


def test_a_finished_sender_keeps_its_blocks_until_the_ranks_are_quiet() -> None:
    scheduler, _ = side()
    admit_send(scheduler, target_of(0, 40))
    scheduler.plan_step([step("r", 0, 40, (1, 2), new=True)], ())
    times = scheduler.finished("r")
    assert times is not None
    assert 0 < times.compute_start_unix_ns <= times.compute_end_unix_ns
    assert scheduler.plan_step([], ()).finished_sends == {"r": "x1"}
    assert scheduler.plan_step([], ()).finished_sends == {}


def test_a_sender_that_never_ran_frees_at_once() -> None:
    scheduler, _ = side()
    admit_send(scheduler, target_of(0, 40))
    assert scheduler.finished("r") is None
    assert scheduler.finished("stranger") is None


def test_a_preempted_sender_fails_and_is_computed_for_nobody() -> None:
    scheduler, _ = side()
    admit_send(scheduler, target_of(0, 100))
    scheduler.plan_step([step("r", 0, 40, (1, 2), new=True)], ())
    assert scheduler.plan_step([], ("r", "stranger")).preempted == ["x1"]
    plan = scheduler.plan_step([step("r", 0, 100, (5, 6, 7, 8), new=True)], ())
    assert (plan.opened, plan.computed) == ([], [])
    assert scheduler.finished("r") is None


@given(
    start_block=st.integers(0, 4),
    length=st.integers(1, 600),
    cached_block=st.integers(0, 18),
    chunks=st.lists(st.integers(1, 200), min_size=1, max_size=40),
)
def test_every_missing_token_is_handed_over_once(
    start_block: int, length: int, cached_block: int, chunks: list[int]
) -> None:
    start = start_block * BLOCK
    end = start + length
    computed = min(cached_block * BLOCK, (end - 1) // BLOCK * BLOCK)
    scheduler, _ = side()
    admit_send(scheduler, target_of(start, end))
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
        plan = scheduler.plan_step([step("r", computed, count, blocks, new=first)], ())
        assert plan.ready == []
        for span in plan.computed:
            assert span.start_token == covered
            assert span.end_token % BLOCK == 0 or span.end_token == end
            assert len(span.block_ids[0]) * BLOCK >= span.end_token
            covered = span.end_token
        computed += count
        assert covered <= max(computed, start)
        first = False
    assert computed == end
    assert covered == end


def test_params_survive_the_way_through_vllm() -> None:
    target = target_of(32, 77)
    assert read_params(outgoing_params(target)) == target
    assert read_params({}) is None


def test_the_whole_prompt_is_missing_where_prefill_makes_the_first_token() -> None:
    scheduler, reserved = side()
    assert scheduler.missing_tokens(incoming_params("x1", True), 128, 96) == 32
    admit_receive(scheduler, prompt=128, cached=96, go_on=[])
    assert reserved == [Reservation("x1", (13,), 96, 128)]


@pytest.mark.parametrize("token_first", [True, False])
def test_a_request_runs_with_both_its_kv_and_its_first_token(token_first: bool) -> None:
    scheduler, _ = side()
    told: list[int] = []
    admit_receive(scheduler, prompt=130, cached=64, go_on=told)
    news = [
        partial(scheduler.first_token, "x1", 7),
        partial(scheduler.settle, "x1", whole=True),
    ]
    for tell, received in zip(news if token_first else news[::-1], ([], ["r"]), strict=True):
        tell()
        assert scheduler.plan_step((), ()).received == received
    assert told == [7]
    scheduler.first_token("x1", 8)
    assert scheduler.plan_step((), ()).received == []
    assert told == [7]


def test_a_whole_transfer_of_a_request_given_up_is_over_without_its_first_token() -> None:
    scheduler, _ = side()
    admit_receive(scheduler, prompt=130, cached=64, go_on=[])
    scheduler.settle("x1", whole=True)
    assert scheduler.plan_step((), ()).received == []
    assert scheduler.finished("r") is None
    assert scheduler.plan_step((), ()).received == ["r"]


def test_a_failed_transfer_waits_for_no_first_token() -> None:
    scheduler, _ = side()
    admit_receive(scheduler, prompt=130, cached=64, go_on=[])
    scheduler.settle("x1", whole=False)
    assert scheduler.plan_step((), ()).failed == ["r"]


def test_a_hybrid_reserves_tokens_and_one_page_of_each_state() -> None:
    scheduler, reserved = side(HYBRID)
    params = incoming_params("x1")
    missing = scheduler.missing_tokens(params, 130, 64)
    # vLLM holds null blocks where it keeps no state any more, or never did.
    blocks = ((0, 0, 0, 0, 41), (7,), (11, 12, 13, 14, 15))
    scheduler.allocated("r", params, blocks, 130, missing, never)
    assert reserved == [Reservation("x1", (13, 14, 15), 64, 129, ((41,), (7,)))]


def test_a_state_whose_last_token_ends_a_block_is_in_that_block() -> None:
    scheduler, reserved = side(HYBRID)
    params = incoming_params("x1")
    scheduler.allocated("r", params, ((0, 0, 0, 40), (7,), (1, 2, 3, 4)), 129, 128, never)
    assert reserved == [Reservation("x1", (1, 2, 3, 4), 0, 128, ((40,), (7,)))]


def test_states_are_handed_over_with_the_last_token_only() -> None:
    scheduler, _ = side(HYBRID)
    admit_send(scheduler, target_of(0, 100))
    blocks = ((0, 21), (31,), (1, 2))
    plan = scheduler.plan_step([ScheduledRequest("r", 0, 64, blocks, True)], ())
    assert [span.block_ids for span in plan.computed] == [((1, 2), (), ())]
    later = ((0, 22), (), (3, 4))
    plan = scheduler.plan_step([ScheduledRequest("r", 64, 36, later, False)], ())
    assert [span.block_ids for span in plan.computed] == [((1, 2, 3, 4), (22,), (31,))]
    assert plan.overrun == []


def test_only_states_are_handed_over_at_once_at_the_end() -> None:
    scheduler, _ = side((group(0, STATE, 1024),))
    admit_send(scheduler, target_of(0, 100))
    plan = scheduler.plan_step([ScheduledRequest("r", 0, 64, ((5,),), True)], ())
    assert (len(plan.opened), plan.computed) == (1, [])
    plan = scheduler.plan_step([ScheduledRequest("r", 64, 36, (), False)], ())
    assert [(s.start_token, s.end_token, s.block_ids) for s in plan.computed] == [(0, 100, ((5,),))]


@pytest.mark.parametrize("first_tokens", [64, 100])
def test_a_state_beyond_the_last_token_is_nobodys(first_tokens: int) -> None:
    scheduler, _ = side(HYBRID)
    admit_send(scheduler, target_of(0, 100))
    blocks = ((0, 21, 22, 23), (31,), (1, 2, 3, 4))
    plan = scheduler.plan_step([ScheduledRequest("r", 0, first_tokens, blocks, True)], ())
    assert plan.overrun == []
    count = 101 - first_tokens
    plan = scheduler.plan_step([ScheduledRequest("r", first_tokens, count, (), False)], ())
    assert (plan.overrun, plan.computed) == (["x1"], [])
    plan = scheduler.plan_step([ScheduledRequest("r", 101, 1, (), False)], ())
    assert (plan.overrun, plan.computed) == ([], [])
    assert scheduler.finished("r") is not None


def test_attention_alone_may_be_computed_beyond_what_is_handed_over() -> None:
    scheduler, _ = side()
    admit_send(scheduler, target_of(0, 100))
    plan = scheduler.plan_step([step("r", 0, 101, (1, 2, 3, 4), new=True)], ())
    assert plan.overrun == []
    assert [(s.start_token, s.end_token) for s in plan.computed] == [(0, 100)]


def test_the_tokens_of_every_group_end_with_a_block() -> None:
    scheduler, _ = side((group(0, TOKENS, 32), group(1, TOKENS, 48)))
    admit_send(scheduler, target_of(0, 500))
    plan = scheduler.plan_step(
        [ScheduledRequest("r", 0, 200, (tuple(range(7)), tuple(range(5))), True)], ()
    )
    assert [(s.start_token, s.end_token) for s in plan.computed] == [(0, 192)]
