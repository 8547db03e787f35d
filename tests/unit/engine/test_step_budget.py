"""The prompt tokens of a step, beside answers with bounds. Times are in seconds, and steps as on a small processor."""

from __future__ import annotations

import pytest

from headrace_common.time_model.model import NO_STEPS, StepTimes
from headrace_engine.step_budget import (
    LEAST_TOKENS,
    AnswerPace,
    Answers,
    Prompt,
    TokenBounds,
    prompt_budget,
)

_TIMES = StepTimes(
    fixed_s=0.010,
    prompt_s=0.002,
    s_per_prompt_token=0.0003,
    s_per_answer=0.0005,
    prompt_steps=50,
    answer_steps=50,
)
_PROMPT = Prompt(TokenBounds(), 1_000)


def _answers(due_s: float, tpot_s: float = 0.05) -> Answers:
    return Answers(running=4, context_tokens=0, due_s=due_s, tpot_s=tpot_s)


def test_a_step_ends_when_the_most_urgent_token_is_due() -> None:
    budget = prompt_budget(0.0, _TIMES, _answers(0.044), [_PROMPT])
    assert budget is not None
    step_s = 0.010 + 0.002 + 4 * 0.0005 + budget * 0.0003
    assert 0.043 < step_s <= 0.044


def test_too_few_tokens_are_left_to_a_later_step() -> None:
    late_s = 0.014 + 0.5 * LEAST_TOKENS * 0.0003
    assert prompt_budget(0.0, _TIMES, _answers(late_s), [_PROMPT]) == 0
    assert prompt_budget(0.0, _TIMES, _answers(-1.0), [_PROMPT]) == 0


def test_nothing_is_bounded_without_bounds_prompts_or_times() -> None:
    assert prompt_budget(0.0, _TIMES, None, [_PROMPT]) is None
    assert prompt_budget(0.0, _TIMES, _answers(0.05), []) is None
    assert prompt_budget(0.0, NO_STEPS, _answers(0.05), [_PROMPT]) is None


@pytest.mark.parametrize(
    ("first_due_s", "urgent"),
    # It takes 0.3 s to compute, of 1 s that it may take in all.
    [(0.4, True), (0.25, True), (0.9, False), (0.1, False), (0.0, False)],
)
def test_a_prompt_that_only_just_keeps_its_bound_may_take_two_tokens_time(
    first_due_s: float, *, urgent: bool
) -> None:
    prompt = Prompt(TokenBounds(first_due_s, 1.0), 1_000)
    budget = prompt_budget(0.0, _TIMES, _answers(0.015), [prompt])
    assert budget is not None
    assert (budget > 200) is urgent
    assert budget * 0.0003 <= 2 * 0.05


def test_an_early_token_leaves_time_to_later_ones() -> None:
    pace = AnswerPace(0.1, now_s=5.0, token_count=3)
    assert pace.due_s(3) == pytest.approx(5.097)
    # Its bound is on the mean: the tenth token is due after seven times the bound, whenever the others came.
    assert pace.due_s(9) == pytest.approx(5.0 + 0.97 * 0.7)
