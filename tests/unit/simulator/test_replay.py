"""Replays of short traces: times by hand, placement, failures, and the planner's changes."""

from __future__ import annotations

from typing import Any

import pytest

from bench.simulation.make_trace import Conversations, conversation_entries
from headrace_planner.settings import BudgetSettings, GoalSettings, PlannerSettings, WorkerProfile
from headrace_simulator.job import SimulationResult
from headrace_simulator.replay import simulate
from headrace_simulator.settings import Scaling, ScalingSettings, SimulationSettings, Way
from headrace_simulator.trace import TraceRequest
from tests.unit.simulator.samples import PROFILE, SLOW_LINK, request


def replay(
    *trace: TraceRequest, profile: WorkerProfile = PROFILE, **settings: Any
) -> SimulationResult:
    return simulate(SimulationSettings(**settings), profile, trace)


def conversations(seconds: float = 400.0) -> list[TraceRequest]:
    shape = Conversations(starts_per_s=0.2, question_tokens=400, answer_tokens=40, think_s=5)
    entries = sorted(conversation_entries(shape, 1, seconds), key=lambda one: int(one["timestamp"]))
    return [
        TraceRequest(
            number,
            one["timestamp"] / 1e3,
            one["input_length"],
            one["output_length"],
            tuple(one["hash_ids"]),
        )
        for number, one in enumerate(entries)
    ]


def test_a_request_takes_its_prefill_and_its_steps() -> None:
    result = replay(request(answer_tokens=11))
    step_s = pytest.approx(0.02, rel=0.1)
    first_s = PROFILE.prompt_s(999)
    assert result.ttft.mean_s == pytest.approx(first_s)
    assert result.itl.mean_s == step_s
    assert result.e2e.mean_s == pytest.approx(first_s + 10 * 0.02)


def test_the_first_token_waits_for_no_hand_over_and_may_be_the_last() -> None:
    slow = replay(request(answer_tokens=3), profile=SLOW_LINK)
    assert slow.ttft.mean_s == pytest.approx(PROFILE.prompt_s(999))
    handover_s = SLOW_LINK.handover_s(999)
    assert slow.e2e.mean_s == pytest.approx(slow.ttft.mean_s + handover_s + 2 * 0.02)
    one = replay(request(answer_tokens=1), request(1, 9.0), profile=SLOW_LINK)
    assert one.e2e.percentiles["p50"] == pytest.approx(PROFILE.prompt_s(999))


def test_plain_engines_compute_prompts_where_they_are_cached_or_least_is_to_do() -> None:
    ids = (1, 2, 3)
    trace = [
        request(0, 0.0, 2_000, 200, ids=ids),
        request(1, 2.5, 2_000, 200, ids=ids),
        request(2, 3.5, 2_000, 200),
    ]
    plain = replay(*trace, both_workers=2, way=Way.PLAIN, ttft_s=0.1, itl_s=0.001)
    assert plain.cached_share == pytest.approx(3 * 512 / 6_000, rel=0.01)
    # The third prompt is alone on the other engine.
    assert plain.ttft.percentiles["p99"] == pytest.approx(PROFILE.prompt_s(1_999), rel=0.02)


def test_plain_engines_compute_prompts_in_the_order_of_arrival() -> None:
    trace = [request(0, 0.0, 8_000), request(1, 0.1, 8_000), request(2, 0.2, 100)]
    steps = PROFILE.model_copy(update={"max_num_batched_tokens": 1_000})
    plain = replay(*trace, profile=steps, both_workers=1, way=Way.PLAIN)
    assert plain.ttft.percentiles["p50"] > 1.9 * PROFILE.prompt_s(7_999)
    # Others compute the short prompt first.
    others = replay(*trace, profile=steps, both_workers=1, bounded=False)
    assert others.ttft.mean_s < 0.7 * plain.ttft.mean_s


def test_prompts_wait_for_each_other() -> None:
    one = replay(request(0), request(1)).ttft.percentiles
    assert one["p99"] - one["p50"] == pytest.approx(PROFILE.prompt_s(999))
    two = replay(request(0), request(1), prefill_workers=2).ttft.percentiles
    # The second answer joins after a step of the first.
    assert two["p99"] == pytest.approx(two["p50"], abs=0.025)


def test_without_prefill_workers_decode_computes_the_prompt_in_steps_with_its_answers() -> None:
    trace = (request(0, answer_tokens=100), request(1, arrival_s=1.5, prompt_tokens=2000))
    result = replay(*trace, prefill_workers=0, itl_s=1.0)
    assert result.ttft.percentiles["p99"] == pytest.approx(2.0 + 0.04, rel=0.02)
    # The answer has early tokens enough: the prompt is computed in one step.
    assert result.e2e.percentiles["p99"] == pytest.approx(1.0 + 2.0 + 100 * 0.02, rel=0.05)


def test_workers_of_both_roles_use_what_fixed_roles_leave_idle() -> None:
    # Prompts for two workers, and next to no answers.
    trace = [request(number, arrival_s=0.6 * number, answer_tokens=2) for number in range(100)]
    both = replay(*trace, both_workers=2, ttft_s=3.0)
    apart = replay(*trace, prefill_workers=1, decode_workers=1, ttft_s=3.0)
    assert both.attainment > apart.attainment + 0.5
    assert both.both_worker_hours == pytest.approx(2 * both.duration_s / 3600)
    assert both.worker_hours == both.both_worker_hours
    one = replay(*trace[:10], both_workers=1, way=Way.ROUND_ROBIN)
    assert not one.failures


def test_workers_of_both_roles_hand_prompts_over_where_answers_leave_no_time() -> None:
    trace = [request(number, answer_tokens=400, prompt_tokens=10) for number in range(12)]
    trace += [request(12 + number, arrival_s=5.0 + 1.5 * number) for number in range(5)]
    result = replay(*trace, both_workers=2, ttft_s=1.5, itl_s=0.05)
    assert result.attainment == 1.0


def test_a_prompt_that_never_fits_fails_alone() -> None:
    result = replay(request(0, prompt_tokens=40_000), request(1))
    assert result.failures == {"INVALID_FIELD": 1}
    assert (result.requests, result.attainment) == (2, 0.0)
    assert replay(request(0, prompt_tokens=40_000), request(1), ttft_s=2.0).attainment == 0.5


def test_placement_by_cached_prefixes_computes_less_than_round_robin() -> None:
    trace = conversations()
    small = PROFILE.model_copy(update={"kv_tokens": 12_000})
    shared: dict[str, Any] = {"prefill_workers": 3, "decode_workers": 3, "host_tokens": 64_000}
    shared["profile"] = small
    by_way = {way: replay(*trace, way=way, **shared) for way in Way}
    shares = {way: result.cached_share for way, result in by_way.items()}
    assert shares[Way.KV_AWARE] > shares[Way.ROUND_ROBIN] + 0.05
    assert shares[Way.KV_AWARE_TIERS] > shares[Way.KV_AWARE]
    assert by_way[Way.KV_AWARE].ttft.mean_s < by_way[Way.ROUND_ROBIN].ttft.mean_s
    assert all(result.requests == len(trace) for result in by_way.values())


@pytest.mark.parametrize("workers", [{"decode_workers": 3}, {"both_workers": 3}])
def test_equal_runs_have_equal_results(workers: dict[str, Any]) -> None:
    trace = conversations(120.0)
    first, again = (replay(*trace, **workers, seed=5) for _ in range(2))
    assert first == again
    assert not first.failures


def scaled(scaling: Scaling) -> dict[str, Any]:
    planner = PlannerSettings(
        goals=GoalSettings(ttft_s=2.0, itl_s=0.05), budget=BudgetSettings(devices_max=12)
    )
    settings = ScalingSettings(
        scaling=scaling, planner=planner, interval_s=30.0, worker_start_s=20.0
    )
    return {"scaling": settings, "ttft_s": 2.0, "itl_s": 0.05}


def rising_load() -> list[TraceRequest]:
    """Two minutes with little load, five with much, then seven with little."""
    times = [*range(0, 120, 10), *(120 + number / 3 for number in range(900)), *range(420, 840, 10)]
    return [request(number, float(at)) for number, at in enumerate(times)]


def test_the_planner_changes_the_number_of_workers_of_both_roles() -> None:
    trace = rising_load()
    result = replay(*trace, both_workers=1, **scaled(Scaling.PLANNER))
    assert not result.failures
    assert max(change.both_workers for change in result.changes) > 2
    assert result.changes[-1].both_workers < 3
    assert all(not change.prefill_workers + change.decode_workers for change in result.changes)
