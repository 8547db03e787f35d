"""The prompt tokens of a step, beside answers with bounds. Times are in seconds, and steps as on a small processor."""

from __future__ import annotations

import pytest

from headrace_common.time_model.model import NO_STEPS, StepTimes
from headrace_engine.step_budget import (
    LEAST_TOKENS,
    AnswerPace,
    Answers,
    NextPrompt,
    TokenBounds,
    prompt_budget,
    turns,
)

_TIMES = StepTimes(
    fixed_s=0.010,
    prompt_s=0.002,
    s_per_prompt_token=0.0003,
    s_per_answer=0.0005,
    prompt_steps=50,
    answer_steps=50,
)
_PROMPT = NextPrompt(TokenBounds(), 1_000)


def _answers(due_s: float) -> Answers:
    return Answers(running=4, context_tokens=0, due_s=due_s, tpot_s=0.05)


def test_a_step_ends_when_the_most_urgent_token_is_due() -> None:
    budget = prompt_budget(0.0, _TIMES, _answers(0.044), _PROMPT)
    assert budget is not None
    step_s = 0.010 + 0.002 + 4 * 0.0005 + budget * 0.0003
    assert 0.043 < step_s <= 0.044


def test_too_few_tokens_are_left_to_a_later_step() -> None:
    late_s = 0.014 + 0.5 * LEAST_TOKENS * 0.0003
    assert prompt_budget(0.0, _TIMES, _answers(late_s), _PROMPT) == 0
    assert prompt_budget(0.0, _TIMES, _answers(-1.0), _PROMPT) == 0


def test_nothing_is_bounded_without_bounds_or_times() -> None:
    assert prompt_budget(0.0, _TIMES, None, _PROMPT) is None
    assert prompt_budget(0.0, NO_STEPS, _answers(0.05), _PROMPT) is None
    assert turns(0.0, NO_STEPS, None, [_bounded(1_000, 1.0), _bounded(10, 0.5)]) == [0, 1]


def test_an_early_token_leaves_time_to_later_ones() -> None:
    pace = AnswerPace(0.1, now_s=5.0, token_count=3)
    assert pace.due_s(3) == pytest.approx(5.097)
    # Its bound is on the mean: the tenth token is due after seven times the bound, whenever the others came.
    assert pace.due_s(9) == pytest.approx(5.0 + 0.97 * 0.7)


def _bounded(tokens: int, due_s: float, first_s: float = 2.0) -> NextPrompt:
    return NextPrompt(TokenBounds(due_s, first_s), tokens)


@pytest.mark.parametrize(
    ("prompts", "order"),
    [
        # 1,000 tokens take 0.3 s. The earliest due is first, whatever came first.
        ([_bounded(1_000, 1.0), _bounded(1_000, 0.8)], [1, 0]),
        # The second cannot be in time behind the longer one, which cannot be in time before it.
        ([_bounded(3_000, 1.0), _bounded(1_000, 1.1)], [1, 0]),
        ([_bounded(3_000, 1.0), _bounded(1_000, 1.3)], [0, 1]),
        # Alone it takes too long, so it delays no other one.
        ([_bounded(4_000, 1.0), _bounded(1_000, 1.4)], [1, 0]),
        # It waited for so many times its bound that it is first.
        ([_bounded(1_000, 1.0), _bounded(4_000, -7.0)], [1, 0]),
        # Without bounds, a short one is before a longer one that came a little earlier, and not much earlier.
        ([NextPrompt(TokenBounds(), 1_000), NextPrompt(TokenBounds(), 100, 0, 0.5)], [1, 0]),
        ([NextPrompt(TokenBounds(), 1_000), NextPrompt(TokenBounds(), 100, 0, 0.9)], [0, 1]),
    ],
)
def test_most_prompts_keep_their_bounds_and_none_starves(
    prompts: list[NextPrompt], order: list[int]
) -> None:
    assert turns(0.0, _TIMES, None, prompts) == order


def test_prompts_are_late_by_the_time_that_answers_leave() -> None:
    prompts = [_bounded(3_000, 1.5), _bounded(1_000, 1.55)]
    assert turns(0.0, _TIMES, None, prompts) == [0, 1]
    # Steps of 12 ms with answers leave three quarters of the time.
    assert turns(0.0, _TIMES, _answers(0.05), prompts) == [1, 0]
