"""The times of prompts and hand-overs, by what prefill workers have learned."""

from __future__ import annotations

import pytest

from headrace_common.time_model.model import HandoverTimes, StepTimes, TimeModel
from headrace_kv.layout import WorkerRef
from headrace_router.prefill_queue.group import LearnedTimes

_HANDOVERS = HandoverTimes(fixed_s=0.002, s_per_byte=1e-9, count=9)
FAST = TimeModel(
    StepTimes(fixed_s=0.01, s_per_prompt_token=1e-4, s_per_attended_token=1e-8, prompt_steps=9),
    _HANDOVERS,
)
SLOW = TimeModel(
    StepTimes(fixed_s=0.03, s_per_prompt_token=3e-4, s_per_attended_token=3e-8, prompt_steps=9)
)
ONE, OTHER = WorkerRef("prefill-0", "a"), WorkerRef("prefill-1", "a")


def test_without_reports_the_time_is_unknown() -> None:
    assert LearnedTimes().prefill_s(100, 0, 0.0) == 0.0


def test_a_worker_without_steps_with_prompts_does_not_count() -> None:
    times = LearnedTimes()
    times.report(ONE, TimeModel(StepTimes(fixed_s=1.0, answer_steps=100)), 0.0)
    assert times.prefill_s(100, 0, 0.0) == 0.0


def test_the_time_is_that_of_the_mean_worker() -> None:
    times = LearnedTimes()
    times.report(ONE, FAST, 0.0)
    assert times.prefill_s(1_000, 0, 0.0) == pytest.approx(0.01 + 0.1 + 0.005)
    times.report(OTHER, SLOW, 0.1)
    assert times.prefill_s(1_000, 0, 1.0) == pytest.approx(2 * (0.01 + 0.1 + 0.005))
    times.remove(OTHER)
    assert times.prefill_s(1_000, 0, 2.0) == pytest.approx(0.01 + 0.1 + 0.005)


def test_tokens_after_a_cached_prefix_attend_to_it() -> None:
    times = LearnedTimes()
    times.report(ONE, FAST, 0.0)
    cached = times.prefill_s(1_000, 2_000, 0.0)
    assert cached == pytest.approx(0.01 + 0.1 + 1e-8 * 1_000 * 2_500)


def test_old_reports_are_forgotten_where_the_caller_says_so() -> None:
    times = LearnedTimes()
    times.report(ONE, FAST, 100.0)
    assert times.prefill_s(100, 0, 130.0, 30.0) > 0.0
    assert times.prefill_s(100, 0, 130.1, 30.0) == 0.0
    assert times.prefill_s(100, 0, 1e6) > 0.0


def test_hand_overs_are_those_of_the_workers_that_have_had_some() -> None:
    times = LearnedTimes()
    times.report(ONE, FAST, 0.0)
    times.report(OTHER, SLOW, 0.0)
    assert times.mean(0.0).handover_s(1e6) == pytest.approx(0.003)


def test_a_hand_over_costs_the_tokens_that_are_computed_in_its_time() -> None:
    times = LearnedTimes()
    assert times.handover_tokens(ONE, 1e6, "d0", 0.0) == 0.0
    slow_link = HandoverTimes(fixed_s=0.5, count=3)
    times.report(ONE, TimeModel(FAST.steps, _HANDOVERS, {"d1": slow_link}), 0.0)
    # What is learned later of another link leaves this one.
    times.report(ONE, TimeModel(FAST.steps, _HANDOVERS, {"d2": slow_link}), 0.0)
    token_s = times.token_s(0.0)
    assert times.handover_tokens(ONE, 1e6, "d0", 0.0) == pytest.approx(0.003 / token_s)
    for link in ("d1", "d2"):
        assert times.handover_tokens(ONE, 1e6, link, 0.0) == pytest.approx(0.5 / token_s)
    assert times.handover_tokens(OTHER, 1e6, "d1", 0.0) == 0.0
