"""How many prompt tokens a step may compute, so that running answers get their tokens in time. Pure.

An answer's bound is on its mean time per output token, so a token that came early leaves time to later ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headrace_common.time_model.model import StepTimes, TimeModel

LEAST_TOKENS: Final = 16
"""Fewer prompt tokens are not worth the fixed time of a prompt in a step."""
_KEPT: Final = 0.97
"""Of the bounds: the rest is for what the times do not show, such as the way to the client."""
_URGENT_FROM: Final = 0.8
"""A prompt is urgent when it has used so much of its time, less what it still takes to compute."""
_URGENT_STEP: Final = 2.0
"""How long a step may take for an urgent prompt, in times of an output token."""


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """When a request's tokens are due. 0 means that there is no bound.

    `first_due_s` is by the host's monotonic clock, and `first_s` is the whole time that the first token may take.
    """

    first_due_s: float = 0.0
    first_s: float = 0.0
    tpot_s: float = 0.0


NO_BOUNDS: Final = TokenBounds()


class AnswerPace:
    """The tokens of one answer with a bound on their mean time. `token_count` are there at `now_s`."""

    __slots__ = ("_start_s", "_start_tokens", "tpot_s")

    def __init__(self, tpot_s: float, now_s: float, token_count: int) -> None:
        self.tpot_s = tpot_s
        self._start_s = now_s
        self._start_tokens = token_count

    def due_s(self, token_count: int) -> float:
        """When the token after the first `token_count` is due."""
        return self._start_s + _KEPT * self.tpot_s * (token_count + 1 - self._start_tokens)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers that get a token in the next step.

    `due_s` is when the most urgent of those tokens is due, and `tpot_s` the smallest bound.
    """

    running: int
    context_tokens: int
    due_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt that is computed next, with its tokens that are not computed and those before them."""

    bounds: TokenBounds
    missing_tokens: int
    prior_tokens: int = 0


def prompt_budget(
    now_s: float, times: StepTimes, answers: Answers | None, prompts: Iterable[Prompt]
) -> int | None:
    """Prompt tokens of the next step. None where nothing bounds them, or the time of steps is unknown."""
    if answers is None:
        return None
    first = next(iter(prompts), None)
    if first is None:
        return None
    model = TimeModel(times)
    prior = first.prior_tokens
    least_s = model.step_s(1, answers.running, answers.context_tokens, prior)
    more_s = model.step_s(1 + LEAST_TOKENS, answers.running, answers.context_tokens, prior)
    if least_s is None or more_s is None or more_s <= least_s:
        return None
    token_s = (more_s - least_s) / LEAST_TOKENS
    budget = int((answers.due_s - now_s - least_s) / token_s)
    if _is_urgent(first, now_s, token_s):
        budget = max(budget, int((_URGENT_STEP * answers.tpot_s - least_s) / token_s))
    return budget if budget >= LEAST_TOKENS else 0


def _is_urgent(prompt: Prompt, now_s: float, token_s: float) -> bool:
    """Whether a prompt still keeps its bound, but only just."""
    bounds = prompt.bounds
    if not bounds.first_due_s:
        return False
    left_s = bounds.first_due_s - now_s - prompt.missing_tokens * token_s
    return -0.1 * bounds.first_s < left_s < (1 - _URGENT_FROM) * bounds.first_s
