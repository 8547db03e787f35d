"""The order of prompts, and how many of their tokens a step may compute beside running answers. Pure.

The order keeps the bounds of as many prompts as it can. The tokens are limited, so that answers get theirs in time. An
answer's bound is on its mean time per output token, so a token that came early leaves time to later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace_common.time_model.model import StepTimes, TimeModel

LEAST_TOKENS: Final = 16
"""Fewer prompt tokens are not worth the fixed time of a prompt in a step."""
_KEPT: Final = 0.97
"""Of the bounds: the rest is for what the times do not show, such as the way to the client."""
_STRETCH: Final = 2.0
"""A prompt without a bound is due after so many times its own computing."""
_DUE_AGAIN: Final = 5.0
"""A prompt that is too late waits for others, until so many times its bound are used."""
_SHARE_MIN: Final = 0.05


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
    """How many answers get a token in the next step, with the tokens before these.

    Of those with a bound, `due_s` is the earliest due token, and `tpot_s` the tightest bound.
    """

    running: int
    context_tokens: int
    due_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """A prompt with its tokens that are not computed, and those before them. The engine has it since `arrival_s`."""

    bounds: TokenBounds
    missing_tokens: int
    prior_tokens: int = 0
    arrival_s: float = 0.0


def turns(
    now_s: float, times: StepTimes, answers: Answers | None, prompts: Sequence[NextPrompt]
) -> list[int]:
    """In which order prompts are computed, by their indices: the earliest due first.

    Where not all of them can be in time, the longest are late: after the others, so that the fewest are. As long as the
    times are unknown, the order does not change.
    """
    if len(prompts) < 2 or not times.knows_prompts:
        return list(range(len(prompts)))
    model = TimeModel(times)
    share = 1.0
    if answers is not None:
        alone_s = model.step_s(0, answers.running, answers.context_tokens) or 0.0
        share = max(_SHARE_MIN, 1.0 - alone_s / (_KEPT * answers.tpot_s))

    def computing_s(tokens: int, prior_tokens: int) -> float:
        return model.step_s(tokens, prior_tokens=prior_tokens) or 0.0

    left_s = [computing_s(one.missing_tokens, one.prior_tokens) / share for one in prompts]
    due_s = [
        one.bounds.first_due_s
        or one.arrival_s + _STRETCH * computing_s(one.prior_tokens + one.missing_tokens, 0)
        for one in prompts
    ]
    may_be_late = [
        one.bounds.first_s > 0 and now_s + left < due + (_DUE_AGAIN - 1) * one.bounds.first_s
        for one, left, due in zip(prompts, left_s, due_s, strict=True)
    ]
    in_time: list[int] = []
    late: list[int] = []
    end_s = now_s
    for index in sorted(range(len(prompts)), key=due_s.__getitem__):
        in_time.append(index)
        end_s += left_s[index]
        if may_be_late[index] and end_s > due_s[index]:
            longest = max((one for one in in_time if may_be_late[one]), key=left_s.__getitem__)
            in_time.remove(longest)
            late.append(longest)
            end_s -= left_s[longest]
    return in_time + sorted(late, key=due_s.__getitem__)


def prompt_budget(
    now_s: float, times: StepTimes, answers: Answers | None, first: NextPrompt
) -> int | None:
    """Prompt tokens of the next step. None where nothing bounds them, or the time of steps is unknown."""
    if answers is None:
        return None
    model = TimeModel(times)
    prior = first.prior_tokens
    least_s = model.step_s(1, answers.running, answers.context_tokens, prior)
    more_s = model.step_s(1 + LEAST_TOKENS, answers.running, answers.context_tokens, prior)
    if least_s is None or more_s is None or more_s <= least_s:
        return None
    token_s = (more_s - least_s) / LEAST_TOKENS
    budget = int((answers.due_s - now_s - least_s) / token_s)
    return budget if budget >= LEAST_TOKENS else 0
