"""Costs by the times of steps: among workers of both roles, and of workers that only generate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.time_model.model import (
    HandoverTimes,
    StepTimes,
    TimeModel,
    time_model_from_proto,
    time_model_to_proto,
)
from headrace_kv.compatibility import fingerprint
from headrace_kv.layout import WorkerRef
from headrace_router import costs
from headrace_router.placement import (
    AnswerLengths,
    Decision,
    KvAware,
    PlacementRequest,
    RoutePolicy,
)
from headrace_router.workers.table import NO_TIMES, Load, LoadTable, PromptQueue, PromptWork, Worker
from tests.sim_layout import LAYOUT

_TIMES = TimeModel(
    StepTimes(
        fixed_s=0.010,
        prompt_s=0.002,
        s_per_prompt_token=0.0003,
        s_per_answer=0.0005,
        prompt_steps=50,
        answer_steps=50,
    ),
    HandoverTimes(fixed_s=0.010, count=9),
)
_ROLES = {
    "p": registry_pb2.WORKER_ROLE_PREFILL,
    "d": registry_pb2.WORKER_ROLE_DECODE,
    "b": registry_pb2.WORKER_ROLE_BOTH,
}
_FREE = Load(total_tokens=10_000, times=_TIMES)
_REQUEST = PlacementRequest(
    "sim",
    1_001,
    inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED,
    RoutePolicy(),
    30.0,
    targets=costs.TokenTargets(ttft_s=2.0, tpot_s=0.05, answer_tokens=50),
)


def _ref(name: str) -> WorkerRef:
    return WorkerRef(name, "i")


def _choose(
    *loads: Load,
    cached: tuple[int, ...] = (),
    request: PlacementRequest = _REQUEST,
    pulling: int | None = None,
    others: tuple[WorkerRef, ...] = (),
    roles: str = "",
    other_layouts: str = "",
    queue: tuple[float, costs.PairCosts | None, TimeModel] = (0.0, None, NO_TIMES),
    step_tokens: int = 0,
) -> Decision:
    """`roles` has the role of each worker: p, d or b. Those with d pull no prompts.

    `other_layouts` names workers. `queue` has the wait, the costs of pairs, and the times of prefill workers.
    """
    names = [f"w{index}" for index in range(len(loads))]
    roles = roles or "b" * len(names)
    table = LoadTable(
        Worker(
            *(_ref(name), f"{name}:1", "sim", 4_096, 64),
            replace(LAYOUT, model="other") if name in other_layouts else LAYOUT,
            computes_prompts=True,
            step_tokens=step_tokens,
            role=_ROLES[role],
        )
        for name, role in zip(names, roles, strict=True)
    )
    for name, load in zip(names, loads, strict=True):
        table.set(_ref(name), load)
    columns = np.array(cached or [0] * len(loads), float)
    refs = {_ref(name) for name, role in zip(names, roles, strict=True) if role != "d"} & set(
        map(_ref, names[:pulling])
    )
    refs |= set(others)
    candidates = costs.Candidates(table, columns, {fingerprint(LAYOUT): frozenset(refs)}, *queue)
    return KvAware(Random(1)).choose(request, candidates)


def _pool(*loads: Load, **more: Any) -> Decision:
    """Workers that only generate, beside a prefill worker."""
    return _choose(*loads, roles="d" * len(loads), others=(_ref("p0"),), **more)


def _with_policy(**fields: float) -> PlacementRequest:
    return replace(_REQUEST, policy=RoutePolicy(**fields))  # type: ignore[arg-type]


def _busy(requests: int) -> Load:
    return replace(_FREE, requests=requests)


def test_an_idle_deployment_computes_a_prompt_where_it_is_answered() -> None:
    decision = _choose(_FREE, _FREE)
    assert not decision.remote
    assert decision.prefill is None
    assert "first token after" in decision.explanation


def test_answers_gather_and_prompts_go_where_none_run() -> None:
    decision = _choose(_busy(4), _FREE)
    assert (decision.worker.ref, decision.remote, decision.prefill) == (
        _ref("w0"),
        True,
        _ref("w1"),
    )


def test_by_policy_new_answers_leave_workers_idle_while_others_have_room() -> None:
    gathering = _with_policy(gather_fill=0.5)
    assert _pool(_busy(2), _FREE).worker.ref == _ref("w1")
    assert _pool(_busy(2), _FREE, request=gathering).worker.ref == _ref("w0")
    # 28 answers take 24 ms, and half of the bound is 25 ms.
    assert _pool(_busy(28), _FREE, request=gathering).worker.ref == _ref("w0")
    assert _pool(_busy(30), _FREE, request=gathering).worker.ref == _ref("w1")


def test_an_answer_goes_to_an_idle_worker_where_a_hand_over_would_cost_more() -> None:
    sending = replace(_TIMES, steps=replace(_TIMES.steps, s_per_sent_token=0.00006))
    decision = _choose(replace(_busy(4), times=sending), replace(_FREE, times=sending))
    assert (decision.worker.ref, decision.remote) == (_ref("w1"), False)


def test_the_tokens_before_those_that_wait_take_time_too() -> None:
    long = replace(_TIMES, steps=replace(_TIMES.steps, s_per_attended_token=1e-6))
    few = Load(total_tokens=10_000, times=long, prompts=PromptWork(tokens=400, attended=2_000_000))
    many = replace(few, prompts=PromptWork(tokens=1_000, attended=1_000_000))
    assert _choose(few, many).worker.ref == _ref("w1")


def test_answers_spread_when_their_tokens_would_be_late() -> None:
    urgent = replace(
        _REQUEST, targets=costs.TokenTargets(ttft_s=4.0, tpot_s=0.020, answer_tokens=50)
    )
    assert _choose(_busy(4), _FREE, request=urgent).worker.ref == _ref("w0")
    assert _choose(_busy(40), _FREE, request=urgent).worker.ref == _ref("w1")


def test_a_prompt_is_computed_beside_answers_when_it_would_wait_elsewhere() -> None:
    waiting = replace(_FREE, prompts=PromptWork(tokens=6_000))
    decision = _choose(_busy(2), waiting)
    assert (decision.worker.ref, decision.remote) == (_ref("w0"), False)


def test_a_cached_prompt_stays_with_its_cache() -> None:
    decision = _choose(_busy(2), _busy(2), cached=(0, 1_000))
    assert (decision.worker.ref, decision.remote) == (_ref("w1"), False)
    assert decision.missing_tokens == 0
    cached = {one.worker_id: one.cached_tokens for one in decision.candidates}
    assert cached["w0"] == 0 < cached["w1"]


@pytest.mark.parametrize(
    ("placement", "remote"),
    [
        (inference_pb2.PREFILL_PLACEMENT_LOCAL, False),
        (inference_pb2.PREFILL_PLACEMENT_REMOTE, True),
    ],
)
def test_the_client_decides_where_it_asks(
    placement: inference_pb2.PrefillPlacement.ValueType, *, remote: bool
) -> None:
    asked = replace(_REQUEST, prefill_placement=placement)
    for loads in ((_FREE, _FREE), (_busy(4), _FREE)):
        assert _choose(*loads, request=asked).remote is remote


def test_no_worker_that_may_not_be_chosen_computes_a_local_prompt() -> None:
    asked = replace(_REQUEST, prefill_placement=inference_pb2.PREFILL_PLACEMENT_LOCAL)
    lost = replace(asked, failed=frozenset({_ref("w1")}))
    for load, request in ((_FREE, lost), (replace(_FREE, draining=True), asked)):
        decision = _choose(_busy(4), load, request=request)
        assert (decision.worker.ref, decision.prefill) == (_ref("w0"), None)


def test_a_single_worker_hands_nothing_over_to_itself() -> None:
    assert not _choose(_FREE).remote
    assert not _choose(Load(total_tokens=10_000)).remote


def test_beside_workers_that_only_compute_prompts_policy_decides_where_they_are_computed() -> None:
    decision = _choose(_FREE, _FREE, others=(_ref("p0"),))
    assert (decision.remote, decision.prefill, decision.first_s) == (True, None, None)
    assert "prompt on a prefill worker" in decision.explanation


def test_a_worker_that_has_learned_nothing_is_as_fast_as_the_mean_of_the_others() -> None:
    new = Load(total_tokens=10_000)
    slow = replace(_FREE, times=replace(_TIMES, steps=replace(_TIMES.steps, fixed_s=0.030)))
    step_ms = {one.worker_id: one.step_ms for one in _choose(_FREE, slow, new).candidates}
    assert step_ms["w2"] == pytest.approx((step_ms["w0"] + step_ms["w1"]) / 2)
    # No prediction is made from that.
    decision = _choose(new, _FREE)
    assert (decision.first_s, decision.others) == (None, ())
    assert _choose(_FREE, _FREE).first_s is not None


_PART = st.sampled_from([0.0, 5e-324, 0.01, 9e11])
_REPORTED = st.tuples(*[_PART] * 8, _PART | st.sampled_from([1e308, -1.0, math.inf, math.nan]))


@given(
    reports=st.lists(_REPORTED.flatmap(st.permutations), min_size=2, max_size=3),
    held=st.sampled_from([0, 50, 2**32]),
    running=st.integers(0, 4),
    waiting=st.sampled_from([0, 700]),
    targets=st.sampled_from([_REQUEST.targets, costs.NO_TARGETS, costs.TokenTargets(0.001, 1e-6)]),
    queue_s=st.sampled_from([0.0, math.inf]),
    placed=st.sampled_from([_choose, _pool]),
)
def test_costs_are_finite_and_grow_with_missing_tokens_whatever_workers_report(
    reports: list[list[float]],
    held: int,
    running: int,
    waiting: int,
    targets: costs.TokenTargets,
    queue_s: float,
    placed: Callable[..., Decision],
) -> None:
    models = []
    for fixed, prompt, token, attended, answer, context, sent, handover, byte in reports:
        steps = StepTimes(fixed, prompt, token, attended, answer, context, 9, 9, 0, 0, sent)
        report = time_model_to_proto(TimeModel(steps, HandoverTimes(handover, byte, 9)))
        models.append(time_model_from_proto(report, "w"))
    load = Load(running, 0, held, prompts=PromptWork(waiting, waiting**2, 9, 9, 0.0))
    loads = [replace(load, times=model) for model in (models[0], *models[:-1])]
    decision = placed(
        *loads,
        cached=(0, *[500] * (len(loads) - 1)),
        request=replace(_REQUEST, targets=targets),
        queue=(queue_s, None, models[-1]),
    )
    shown = {names[0]: numbers for names, numbers in decision.shown}
    assert np.isfinite([*shown.values()]).all()
    # The first two workers differ only in their caches.
    assert shown["w0"][:2] >= shown["w1"][:2]


def test_workers_that_pull_no_prompts_compute_only_their_own() -> None:
    decision = _choose(_busy(4), _FREE, pulling=1)
    assert not decision.remote


@pytest.mark.parametrize("times", [_TIMES, NO_TIMES])
def test_a_worker_restricted_to_prefill_gets_no_answers_while_another_can_have_them(
    times: TimeModel,
) -> None:
    free, busy = replace(_FREE, times=times), replace(_busy(60), times=times)
    decision = _choose(free, busy, roles="pb")
    assert decision.worker.ref == _ref("w1")
    assert "restricted to prefill" in str(decision.candidates[1])
    # None of these can have it: full, unreachable, failed, draining.
    full, failed = replace(busy, requests=64), replace(_REQUEST, failed=frozenset({_ref("w1")}))
    assert _choose(free, full, roles="pd").worker.ref == _ref("w0")
    assert _choose(free, replace(busy, reachable=False), roles="pd").worker.ref == _ref("w0")
    assert _choose(free, busy, roles="pd", request=failed).worker.ref == _ref("w0")
    assert _choose(free, replace(busy, draining=True), roles="pd").worker.ref == _ref("w0")
    assert _choose(free, busy, roles="pp").worker.ref == _choose(free, busy).worker.ref


@pytest.mark.parametrize("times", [_TIMES, NO_TIMES])
def test_a_worker_restricted_to_decode_computes_the_prompts_that_a_decode_worker_does(
    times: TimeModel,
) -> None:
    free = replace(_FREE, times=times)
    waiting = replace(free, requests=9, prompts=PromptWork(tokens=9_000))
    decision = _choose(free, waiting, roles="dp")
    assert (decision.worker.ref, decision.remote) == (_ref("w0"), True)
    assert decision.prefill == _ref("w1")
    short = replace(_REQUEST, policy=RoutePolicy(local_prefill_max_tokens=1_001))
    assert not _choose(free, waiting, roles="dp", request=short).remote
    asked = replace(_REQUEST, prefill_placement=inference_pb2.PREFILL_PLACEMENT_LOCAL)
    assert not _choose(free, waiting, roles="dp", request=asked).remote
    # No other worker computes prompts.
    assert not _choose(free, waiting, roles="dd").remote
    lost = replace(_REQUEST, failed=frozenset({_ref("w1")}))
    assert not _choose(free, waiting, roles="dp", request=lost).remote


def test_a_worker_restricted_to_decode_gets_no_prompts_of_others() -> None:
    for roles in ("bdb", "ddb", "pdb"):
        decision = _choose(_busy(4), _FREE, _busy(4), roles=roles)
        assert decision.prefill != _ref("w1")


def test_other_decisions_have_times_from_the_same_state() -> None:
    # 302 ms to compute the prompt, 10.5 ms for a step. Another worker's step with prompts takes 10 ms beside them.
    idle = {one.kind: one for one in _choose(_FREE, _FREE).others}
    assert set(idle) == {costs.OTHER_DECODE, costs.REMOTE}
    assert idle[costs.OTHER_DECODE].first_s == pytest.approx(0.3225)
    # A hand-over takes 10 ms, and its messages 20 ms.
    assert idle[costs.REMOTE].first_s == pytest.approx(0.3525)
    assert idle[costs.REMOTE].estimate_s(prompt_s=9.0) == idle[costs.REMOTE].first_s


def test_what_the_same_worker_computes_is_not_predicted_again() -> None:
    decision = _choose(_busy(4), _FREE)
    (other,) = decision.others
    assert (other.kind, other.worker.ref, other.prefill) == (
        costs.OTHER_DECODE,
        _ref("w1"),
        _ref("w1"),
    )
    # One step of 10.5 ms after the end of computing.
    assert other.after_prompt
    assert other.estimate_s(prompt_s=1.0) == pytest.approx(1.0105)


def test_the_first_token_of_another_worker_waits_for_no_hand_over() -> None:
    early = replace(_REQUEST, early_first=True)
    # 302 ms to compute the prompt, then 20 ms of messages. A step of a worker with prompts takes 10 ms beside them.
    assert _choose(_busy(4), _FREE, request=early).first_s == pytest.approx(0.322)
    remote = {one.kind: one for one in _choose(_FREE, _FREE, request=early).others}[costs.REMOTE]
    assert remote.first_s == pytest.approx(0.332)


def test_ways_beside_answers_or_into_long_steps_have_no_estimate() -> None:
    computing = replace(_FREE, prompts=PromptWork(tokens=300))
    decision = _choose(_busy(4), _FREE, computing)
    kinds = {one.kind: one for one in decision.others}
    # Beside the four answers, the time of a local prefill depends on how early their tokens have come.
    assert (decision.prefill, costs.LOCAL in kinds) == (_ref("w1"), False)
    assert kinds[costs.OTHER_PREFILL].prefill == _ref("w2")
    # The third worker may compute a long step when the answer could join.
    assert kinds[costs.OTHER_DECODE].worker.ref == _ref("w1")
    assert not _choose(_busy(1)).others
    assert not _choose(Load(total_tokens=10_000), _FREE).others


def test_a_failed_worker_is_not_chosen_for_the_prompt() -> None:
    request = replace(_REQUEST, failed=frozenset({_ref("w1")}))
    decision = _choose(_busy(4), _FREE, _FREE, request=request)
    assert decision.prefill == _ref("w2")


def test_the_work_of_a_prompt_ends_in_the_order_of_arrival() -> None:
    queue = PromptQueue()
    first, second = queue.add(100, 1.0), queue.add(50, 2.0)
    assert queue.work == PromptWork(150, 5_000 + 1_250, 100, 5_000, 1.0)
    queue.remove(first, 5.0)
    assert queue.work == PromptWork(50, 1_250, 50, 1_250, 5.0)
    queue.remove(first, 6.0)
    queue.remove(second, 7.0)
    assert queue.work.tokens == 0
    queue.add(10, 9.0, cached_tokens=100)
    assert queue.work == PromptWork(10, 1_050, 10, 1_050, 9.0)


def test_the_expected_length_follows_recent_answers() -> None:
    lengths = AnswerLengths()
    assert lengths.expected("m", 16) == 16
    for _ in range(200):
        lengths.ended("m", 40)
    assert lengths.expected("m", 1_000) == pytest.approx(40)


def test_bounds_count_from_the_arrival() -> None:
    bounds = costs.TokenTargets(2.0, 0.05, elapsed_s=0.5).bounds(started=False)
    assert bounds is not None
    assert bounds.first_token_remaining.ToMilliseconds() == 1_500
    later = costs.TokenTargets(2.0, None).bounds(started=True)
    assert later is None


def _shown(decision: Decision) -> dict[str, inference_pb2.Candidate]:
    return {one.worker_id: one for one in decision.candidates}


def test_answers_spread_over_workers_that_only_generate() -> None:
    assert _pool(_busy(4), _FREE).worker.ref == _ref("w1")
    assert _pool(_busy(4), _busy(5)).worker.ref == _ref("w0")
    # 300 ms of computing outweigh a few answers, and not many.
    assert _pool(_busy(4), _FREE, cached=(1_000, 0)).worker.ref == _ref("w0")
    assert _pool(_busy(40), _FREE, cached=(1_000, 0)).worker.ref == _ref("w1")


def test_a_remote_prompt_takes_the_wait_its_computing_its_hand_over_and_a_step() -> None:
    prefill = TimeModel(
        StepTimes(fixed_s=0.1, s_per_prompt_token=0.001, prompt_steps=9),
        HandoverTimes(fixed_s=0.02, s_per_byte=1e-3 / LAYOUT.token_bytes, count=9),
    )
    near = _shown(_pool(_FREE, queue=(0.5, None, prefill)))["w0"]
    # 0.5 s of wait, 1.1 s of computing, 20 ms of messages, 20 ms and 1 s of hand-over, and a step of 10.5 ms.
    assert near.first_token_ms == pytest.approx(2_650.5)
    pairs = costs.PairCosts(np.array([True]), np.array([0.5]))
    far = _shown(_pool(_FREE, queue=(0.5, pairs, prefill)))["w0"]
    assert far.first_token_ms == pytest.approx(3_200.5)
    # A first token of the prefill worker waits for no hand-over and no step. The answer does, and is not late.
    early = replace(_REQUEST, early_first=True)
    (own,) = _pool(_FREE, queue=(0.5, None, prefill), request=early).candidates
    assert own.first_token_ms == pytest.approx(1_620)
    assert own.cost_ms == pytest.approx(near.cost_ms - 1e3 * 2 * (2.6505 - 0.85 * 2))


def test_priors_are_of_the_same_kind_else_of_all_else_generic() -> None:
    slow = replace(_FREE, times=replace(_TIMES, steps=replace(_TIMES.steps, fixed_s=0.050)))
    new = Load(total_tokens=10_000)
    found = _shown(_pool(_FREE, slow, new, other_layouts="w1 w2"))
    assert found["w2"].step_ms == found["w1"].step_ms
    found = _shown(_pool(_FREE, slow, new, other_layouts="w2"))
    assert found["w2"].step_ms == pytest.approx(30.5)
    # No worker has computed prompts: a token costs twice that of a generic worker, as the step does.
    answers = replace(_TIMES, steps=replace(_TIMES.steps, fixed_s=0.020, prompt_steps=0))
    (only,) = _pool(replace(_FREE, times=answers)).candidates
    assert only.first_token_ms == pytest.approx(200 + 20 + 20.5)
    # What prefill workers have learned comes before it, also where a worker computes the prompt itself.
    prefill = TimeModel(StepTimes(s_per_prompt_token=0.002, prompt_steps=9))
    local = _with_policy(local_prefill_max_tokens=2_000)
    (only,) = _pool(
        replace(_FREE, times=answers), request=local, queue=(0.0, None, prefill)
    ).candidates
    assert only.first_token_ms == pytest.approx(2_000 + 20.5)


def test_nothing_learned_weighs_a_missing_token_like_about_four_held_ones() -> None:
    request = replace(_REQUEST, targets=costs.TokenTargets(answer_tokens=128))
    for held, chosen in ((2_000, "w0"), (6_000, "w1")):
        load = Load(requests=held // 1_000, held_tokens=held)
        assert _pool(load, Load(), cached=(1_000, 0), request=request).worker.ref == _ref(chosen)


_LONG = replace(
    _REQUEST, prompt_tokens=8_001, policy=RoutePolicy(divide_gain=0.15), may_divide=True
)


@pytest.mark.parametrize(
    ("step_tokens", "share", "token"),
    [(1_024, 0.9, None), (2_048, 0.8, 6_000), (4_096, 0.6, 4_000), (8_192, 0.6, 4_000)],
)
def test_a_prompt_is_divided_where_one_step_of_both_is_enough_of_it(
    step_tokens: int, share: float, token: int | None
) -> None:
    """Contiguous parts save the time of one step at most."""
    alone = _choose(_FREE, _FREE, request=replace(_LONG, may_divide=False), step_tokens=step_tokens)
    decision = _choose(_FREE, _FREE, request=_LONG, step_tokens=step_tokens)
    assert alone.first_s is not None
    assert decision.first_s is not None
    if token is None:
        assert decision.computes_from == 0
        return
    assert decision.computes_from == pytest.approx(token, abs=200)
    assert decision.computes_from % LAYOUT.block_tokens == 0
    assert decision.prefill not in (None, decision.worker.ref)
    assert decision.prefill_tokens == decision.computes_from
    assert decision.candidates[0].cached_tokens == 0
    assert decision.first_s < share * alone.first_s


@pytest.mark.parametrize(
    ("loads", "change"),
    [
        ((_busy(1), _busy(1)), {}),
        ((_FREE, replace(_FREE, prompts=PromptWork(500, 500.0 * 250))), {}),
        ((_FREE,), {}),
        ((_FREE, _FREE), {"may_divide": False}),
        ((_FREE, _FREE), {"policy": RoutePolicy()}),
        ((_FREE, _FREE), {"prompt_tokens": 60}),
    ],
    ids=["answers run", "a prompt waits", "alone", "not allowed", "off", "short"],
)
def test_a_prompt_is_not_divided(loads: tuple[Load, ...], change: dict[str, Any]) -> None:
    decision = _choose(*loads, request=replace(_LONG, **change), step_tokens=8_192)
    assert decision.computes_from == 0


def test_a_cached_prefix_moves_the_division() -> None:
    decision = _choose(_FREE, _FREE, cached=(4_000, 4_000), request=_LONG, step_tokens=8_192)
    assert decision.computes_from == pytest.approx(6_000, abs=300)
    assert decision.cached_tokens == 4_000
