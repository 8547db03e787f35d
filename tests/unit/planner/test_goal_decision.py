"""Workers for the goals of latency: formulas by hand, and their limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace_planner.goal_decision import (
    Corrections,
    decide_by_goals,
    fewest_workers,
    late_share,
    mean_wait_s,
    pool_by_goals,
    predict_demand,
)
from headrace_planner.observation import PlannedRole, Reason, RequestStatistics
from headrace_planner.settings import GoalSettings, PlannerSettings, PrefillPoint, WorkerProfile
from tests.unit.planner.samples import PROFILE, interval, requests

SETTINGS = PlannerSettings(goals=GoalSettings(ttft_s=0.2, itl_s=0.05))
MEANS = PlannerSettings(goals=GoalSettings(ttft_s=0.2, itl_s=0.05, share=0.5))

AS_PROFILED = Corrections()


def needed(
    observed: RequestStatistics,
    correction: Corrections = AS_PROFILED,
    settings: PlannerSettings = MEANS,
) -> tuple[int, int]:
    demand = predict_demand(settings, [interval(requests=observed)])
    assert demand is not None
    prefill, decode = decide_by_goals(settings, PROFILE, demand, correction)
    return prefill.count, decode.count


def pool(
    observed: RequestStatistics,
    correction: Corrections = AS_PROFILED,
    settings: PlannerSettings = MEANS,
) -> Reason:
    demand = predict_demand(settings, [interval(requests=observed)])
    assert demand is not None
    (reason,) = pool_by_goals(settings, PROFILE, demand, correction)
    assert reason.role is PlannedRole.BOTH
    return reason


def test_a_pool_needs_at_most_the_workers_of_two_pools_and_at_least_their_shares() -> None:
    for count in (1, 30, 150, 600, 3_000):
        for prompt_tokens, answer_tokens in ((1000.0, 10.0), (100.0, 400.0), (1000.0, 200.0)):
            observed = requests(count, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
            reason = pool(observed)
            shares = reason.inputs["prompt_workers"] + reason.inputs["answer_workers"]
            assert shares <= reason.count <= sum(needed(observed))
    # 1 request per second of 0.1 s, and 100 tokens per second of a worker's 1,000: one worker does both.
    few = pool(requests(30))
    assert (few.count, needed(requests(30))) == (1, (1, 1))
    assert few.inputs["prompt_workers"] == pytest.approx(0.1)
    assert few.inputs["answer_workers"] == pytest.approx(0.1)
    assert "1 workers do both" in few.sentence


def test_a_pool_without_requests_needs_none_and_a_goal_out_of_reach_is_named() -> None:
    assert pool(requests(0)).count == 0
    late = pool(requests(30), settings=PlannerSettings(goals=GoalSettings(ttft_s=0.05)))
    assert "no number of workers reaches it" in late.sentence
    assert late.count == 1


def test_slow_tokens_of_a_pool_need_no_more_workers() -> None:
    observed = requests(600)
    assert pool(observed, Corrections(itl=3.0)).count == pool(observed).count
    assert pool(observed, Corrections(ttft=0.5)).count <= pool(observed).count


def test_one_worker_has_the_wait_of_an_m_m_1_queue() -> None:
    # rho / (1 - rho) x service, with rho = 0.5.
    assert mean_wait_s(5.0, 0.1, 1) == pytest.approx(0.1)
    assert mean_wait_s(10.0, 0.1, 1) == math.inf


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
    assert count == fewest_workers(20.0, 0.1, 0.1) == 3
    # Of three workers, 4/9 x exp(-1) = 16 % of the prompts wait longer than 0.1 s.
    assert needed(requests(600), settings=SETTINGS)[0] == 4


def test_decode_workers_have_room_for_the_answers_of_most_moments() -> None:
    # 2,000 tokens per second with 40 ms are 80 answers, and 40 fit a worker. 80 + 1.28 x sqrt(80) = 91.5.
    assert needed(requests(600))[1] == 2
    assert needed(requests(600), settings=SETTINGS)[1] == 3
    # 10 answers and 1.28 x sqrt(10) more fit one worker.
    assert needed(requests(75), settings=SETTINGS)[1] == 1


def test_cached_tokens_are_not_computed() -> None:
    assert needed(requests(600, prompt_tokens=2000, cached_share=0.5))[0] == 3
    assert needed(requests(600, prompt_tokens=2000))[0] > 3


def test_a_goal_out_of_reach_is_named() -> None:
    demand = predict_demand(SETTINGS, [interval(requests=requests(30, prompt_tokens=2000))])
    assert demand is not None
    prefill, _ = decide_by_goals(SETTINGS, PROFILE, demand, Corrections())
    assert "no number of workers" in prefill.sentence
    assert prefill.count >= 1


def test_decode_workers_have_the_throughput_that_the_goal_allows() -> None:
    # 20 x 100 tokens per second: 1,000 of a worker at 40 ms, 400 of one at 10 ms.
    assert needed(requests(600))[1] == 2
    # The goal of 50 ms is 20 ms of the profile when everything takes 2.5 times as long: 600 tokens per second.
    assert needed(requests(600), Corrections(itl=2.5))[1] == 4
    # No point is faster than 10 ms.
    assert needed(requests(600), Corrections(itl=5.5))[1] == 5


def test_long_contexts_use_their_own_points() -> None:
    settings = PlannerSettings(goals=GoalSettings(ttft_s=0.2, itl_s=0.1))
    observed = requests(30, prompt_tokens=3950, answer_tokens=100)
    demand = predict_demand(settings, [interval(requests=observed)])
    assert demand is not None
    _, decode = decide_by_goals(settings, PROFILE, demand, Corrections())
    assert decode.inputs["worker_tokens_per_s"] == 300


def test_without_requests_there_is_no_demand() -> None:
    assert predict_demand(SETTINGS, [interval()]) is None


def test_idle_intervals_lower_the_rate_and_keep_the_lengths() -> None:
    demand = predict_demand(SETTINGS, [interval(requests=requests(60)), interval()])
    assert demand is not None
    assert demand.requests.value == 0.0
    assert demand.prompt_tokens.value == 1000.0


def test_a_profile_is_interpolated_and_extended() -> None:
    assert PROFILE.ttft_s(10) == 0.1
    assert PROFILE.ttft_s(1500) == pytest.approx(0.2)
    assert PROFILE.ttft_s(4000) == pytest.approx(0.6)
    assert PROFILE.expected_itl_s(0.5, 900) == pytest.approx(0.025)
    assert PROFILE.expected_itl_s(1.0, 900) == 0.04


def test_points_out_of_order_are_refused() -> None:
    points = PROFILE.prefill[::-1]
    with pytest.raises(ValidationError, match="increasing order"):
        WorkerProfile(prefill=points, decode=PROFILE.decode)
    with pytest.raises(ValidationError, match="increasing order"):
        WorkerProfile(prefill=(PrefillPoint(prompt_tokens=5, ttft_s=1),) * 2, decode=PROFILE.decode)
