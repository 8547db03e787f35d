"""Workers for the goals of latency: formulas by hand, and their limits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.time_model.model import NO_STEPS, HandoverTimes, TimeModel
from headrace_planner.goal_decision import (
    decide_by_goals,
    fewest_workers,
    late_share,
    mean_wait_s,
    pool_by_goals,
    predict_demand,
)
from headrace_planner.observation import PlannedRole, Reason, RequestStatistics
from headrace_planner.settings import GoalSettings, PlannerSettings, WorkerProfile, learned_profile
from tests.unit.planner.samples import PROFILE, interval, requests

SETTINGS = PlannerSettings(goals=GoalSettings(ttft_s=0.2, itl_s=0.05))
EACH = 1 + (0.05 - 0.01075) / 7.5e-4
"""Answers of a worker with steps that take the goal of 50 ms."""
MEANS = PlannerSettings(goals=GoalSettings(ttft_s=0.2, itl_s=0.05, share=0.5))


def needed(observed: RequestStatistics, settings: PlannerSettings = MEANS) -> tuple[int, int]:
    demand = predict_demand(settings, [interval(requests=observed)])
    assert demand is not None
    prefill, decode = decide_by_goals(settings, PROFILE, demand)
    return prefill.count, decode.count


def pool(observed: RequestStatistics, settings: PlannerSettings = MEANS) -> Reason:
    demand = predict_demand(settings, [interval(requests=observed)])
    assert demand is not None
    (reason,) = pool_by_goals(settings, PROFILE, demand)
    assert reason.role is PlannedRole.BOTH
    return reason


def test_a_pool_needs_at_most_the_workers_of_two_pools_and_at_least_their_shares() -> None:
    for count in (1, 30, 150, 600, 3_000):
        for prompt_tokens, answer_tokens in ((1000.0, 10.0), (100.0, 400.0), (1000.0, 200.0)):
            observed = requests(count, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
            reason = pool(observed)
            shares = reason.inputs["prompt_workers"] + reason.inputs["answer_workers"]
            assert shares <= reason.count <= sum(needed(observed))
    # 1 request per second of 0.1 s, and 5 answers of the 53.3 that a worker has in steps of 50 ms: one does both.
    few = pool(requests(30))
    assert (few.count, needed(requests(30))) == (1, (1, 1))
    assert few.inputs["prompt_workers"] == pytest.approx(0.1)
    assert few.inputs["answer_workers"] == pytest.approx(5 / EACH)
    assert "1 workers do both" in few.sentence


@given(st.floats(0.01, 1000), st.floats(0.001, 5), st.floats(0.001, 5))
def test_the_fewest_workers_keep_the_wait_and_one_less_does_not(
    rate: float, service_s: float, wait_max_s: float
) -> None:
    count = fewest_workers(rate, service_s, wait_max_s)
    assert mean_wait_s(rate, service_s, count) <= wait_max_s
    if count > 1:
        assert mean_wait_s(rate, service_s, count - 1) > wait_max_s


def test_the_share_of_late_arrivals_is_that_of_an_m_m_1_queue() -> None:
    # rho x exp(-(1 - rho) x wait / service), with rho = 0.5.
    assert late_share(5.0, 0.1, 1, 0.0) == pytest.approx(0.5)
    assert late_share(5.0, 0.1, 1, 0.2) == pytest.approx(0.5 * math.exp(-1.0))
    assert late_share(10.0, 0.1, 1, 5.0) == 1.0
    # Erlang's C of 2 erlangs on 3 servers is 4/9.
    assert late_share(20.0, 0.1, 3, 0.0) == pytest.approx(4 / 9)


@given(st.floats(0.01, 500), st.floats(0.001, 5), st.floats(0.001, 5), st.floats(0.001, 0.5))
def test_few_arrivals_wait_longer_and_with_one_worker_less_more_do(
    rate: float, service_s: float, wait_max_s: float, late_share_max: float
) -> None:
    count = fewest_workers(rate, service_s, wait_max_s, late_share_max)
    assert late_share(rate, service_s, count, wait_max_s) <= late_share_max
    assert mean_wait_s(rate, service_s, count) <= wait_max_s
    if count > 1:
        assert (
            late_share(rate, service_s, count - 1, wait_max_s) > late_share_max
            or mean_wait_s(rate, service_s, count - 1) > wait_max_s
        )


def test_prefill_workers_keep_the_wait_within_the_goal() -> None:
    # 20 requests per second of 0.1 s each need more than 2 workers, which have utilization 1.
    count, _ = needed(requests(600))
    assert count == fewest_workers(20.0, 0.1, 0.2 - 0.1 - 0.01075) == 3
    # Of three workers, 4/9 x exp(-0.89) = 18 % of the prompts wait longer than 0.089 s.
    assert needed(requests(600), settings=SETTINGS)[0] == 4


def test_decode_workers_have_room_for_the_answers_of_most_moments() -> None:
    # 2,000 tokens per second with 50 ms are 100 answers, and 53.3 fit a worker. 100 + 1.28 x sqrt(100) = 112.8.
    assert needed(requests(600))[1] == 2
    assert needed(requests(600), settings=SETTINGS)[1] == 3
    # 12.5 answers and 1.28 x sqrt(12.5) more fit one worker.
    assert needed(requests(75), settings=SETTINGS)[1] == 1


def test_decode_workers_have_the_answers_that_the_goal_allows() -> None:
    # 2,000 tokens per second with 20 ms are 40 answers, and 13.3 fit a worker.
    assert needed(requests(570), settings=goals(0.02))[1] == 3
    assert needed(requests(630), settings=goals(0.02))[1] == 4
    # No step is shorter than 10.75 ms.
    assert needed(requests(600), settings=goals(0.005))[1] == math.ceil(2_000 * 0.01075)
    demand = predict_demand(MEANS, [interval(requests=requests(600))])
    assert demand is not None
    _, decode = decide_by_goals(goals(0.005), PROFILE, demand)
    assert "No load of a worker reaches the goal of 5.0 ms" in decode.sentence


def goals(itl_s: float) -> PlannerSettings:
    return PlannerSettings(goals=GoalSettings(ttft_s=0.2, itl_s=itl_s, share=0.5))


def test_idle_intervals_lower_the_rate_and_keep_the_lengths() -> None:
    demand = predict_demand(SETTINGS, [interval(requests=requests(60)), interval()])
    assert demand is not None
    assert demand.requests.value == 0.0
    assert demand.prompt_tokens.value == 1000.0


def test_a_profile_has_the_time_of_a_prompt_and_its_hand_over() -> None:
    profile = WorkerProfile(
        steps=replace(PROFILE.steps, prompt_s=0.01, s_per_attended_token=1e-7),
        handovers=HandoverTimes(fixed_s=0.005, s_per_byte=1e-9, count=9),
        kv_bytes_per_token=1_000,
        max_num_batched_tokens=2_000,
    )
    assert profile.prompt_s(1_000) == pytest.approx(0.02 + 0.09 + 0.05)
    assert profile.prompt_s(1_000, prior_tokens=2_000) == pytest.approx(0.02 + 0.09 + 0.25)
    assert profile.prompt_s(3_000) == pytest.approx(2 * 0.02 + 0.27 + 0.45)
    assert profile.handover_s(1_000) == pytest.approx(0.006)
    assert profile.step_s(4, 1_000) == pytest.approx(0.013)


def model(**parts: Any) -> TimeModel:
    return TimeModel(replace(NO_STEPS, **parts), HandoverTimes(fixed_s=0.01, count=3))


def test_a_profile_is_the_mean_of_what_workers_have_learned() -> None:
    # Both workers of a pool of prefill know the sum of the fixed parts only.
    prefill = [
        model(fixed_s=0.03, s_per_prompt_token=each, prompt_steps=9) for each in (1e-4, 3e-4)
    ]
    decode = [model(fixed_s=0.01, s_per_answer=2e-3, answer_steps=7)]
    found = learned_profile([*prefill, TimeModel()], [*decode, TimeModel()], max_num_seqs=8)
    assert found is not None
    assert found.steps.prompt_s == pytest.approx(0.02)
    assert found.prompt_s(1_000) == pytest.approx(0.03 + 0.2)
    assert found.step_s(2, 500) == pytest.approx(0.014)
    assert found.handovers.fixed_s == pytest.approx(0.01)
    assert found.max_num_seqs == 8
    assert learned_profile(prefill, [TimeModel()]) is None
    assert learned_profile([], decode) is None
