"""The order of prompts, and how many of their tokens a step may compute beside running answers. Pure.

The order keeps the bounds of as many prompts as it can. The tokens are limited, so that answers get theirs in time. An
answer's bound is on its mean time per output token, so a token that came early leaves time to later ones. Tokens may
also come later, as far as those after them can make up for it. They do when a prompt would miss its own bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace_common.time_model.model import StepTimes, TimeModel

LEAST_TOKENS: Final = 16
"""Fewer prompt tokens are not worth the fixed time of a prompt in a step."""
_KEPT: Final = 0.97
"""Of the bounds: the rest is for what the times do not show, such as the way to the client."""
_URGENT_FROM, _URGENT_TO = 0.3, 0.7
"""The part of a prompt's time that is used, with what it still takes to compute: answers wait for it more and more."""
_LATEST: Final = -0.1
"""A prompt that misses its bound by this part of it is not urgent any more."""
_LAG_MAX: Final = 8.0
"""How late an answer's token may come for an urgent prompt, in times of an output token."""
_FASTER: Final = 1.2
"""Steps that make up for late tokens take so many times the time of one with answers alone."""
_STRETCH: Final = 3.0
"""A prompt without a bound is due after so many times its own computing."""
_DUE_AGAIN: Final = 8.0
"""A prompt that is too late waits for others, until so many times its bound are used."""
_SHARE_MIN: Final = 0.05
_SURE_TOKENS: Final = 16
"""An answer is taken to have at least so many more tokens than it has, and no more than the request allows."""


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

    def due(self, token_count: int, tokens_max: int) -> DueToken:
        """The token after the first `token_count`, of an answer of at most `tokens_max`."""
        made = token_count + 1 - self._start_tokens
        later_tokens = max(0, min(tokens_max - token_count - 1, made + _SURE_TOKENS))
        return DueToken(self._start_s + _KEPT * self.tpot_s * made, self.tpot_s, later_tokens)


@dataclass(frozen=True, slots=True)
class DueToken:
    """The next token of an answer with a bound. At least `later_tokens` follow it."""

    due_s: float
    tpot_s: float
    later_tokens: int


@dataclass(frozen=True, slots=True)
class Answers:
    """How many answers get a token in the next step, with the tokens before these. `due` has those with a bound."""

    running: int
    context_tokens: int
    due: Sequence[DueToken]


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
    share = _share_of_prompts(times, answers)
    left_s = [_computing_s(times, one.missing_tokens, one.prior_tokens) / share for one in prompts]
    due_s = [_due_s(times, one) for one in prompts]
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


def _computing_s(times: StepTimes, tokens: int, prior_tokens: int) -> float:
    attended_s = times.s_per_attended_token * (prior_tokens + tokens / 2)
    return tokens * (times.s_per_prompt_token + attended_s)


def _due_s(times: StepTimes, prompt: NextPrompt) -> float:
    if prompt.bounds.first_s:
        return prompt.bounds.first_due_s
    whole_s = _computing_s(times, prompt.prior_tokens + prompt.missing_tokens, 0)
    return prompt.arrival_s + _STRETCH * whole_s


def _share_of_prompts(times: StepTimes, answers: Answers | None) -> float:
    """What answers with bounds leave of the time."""
    if answers is None or not answers.due:
        return 1.0
    alone_s = TimeModel(times).step_s(0, answers.running, answers.context_tokens) or 0.0
    return max(_SHARE_MIN, 1.0 - alone_s / (_KEPT * min(one.tpot_s for one in answers.due)))


def prompt_budget(
    now_s: float, times: StepTimes, answers: Answers | None, prompts: Iterable[NextPrompt]
) -> int | None:
    """Prompt tokens of the next step. None where nothing bounds them, or the time of steps is unknown."""
    first = next(iter(prompts), None)
    if answers is None or first is None:
        return None
    model = TimeModel(times)
    prior = first.prior_tokens
    least_s = model.step_s(1, answers.running, answers.context_tokens, prior)
    more_s = model.step_s(1 + LEAST_TOKENS, answers.running, answers.context_tokens, prior)
    if least_s is None or more_s is None or more_s <= least_s:
        return None
    token_s = (more_s - least_s) / LEAST_TOKENS
    lag = _LAG_MAX * _urgency(first, now_s, token_s)
    alone_s = least_s - times.prompt_s
    due_s = min(_latest_s(token, lag, alone_s) for token in answers.due)
    budget = int((due_s - now_s - least_s) / token_s)
    return budget if budget >= LEAST_TOKENS else 0


def _latest_s(token: DueToken, lag: float, step_s: float) -> float:
    """When a token may come, `lag` times of an output token late. Later tokens take steps of `step_s`."""
    gained_s = max(0.0, _KEPT * token.tpot_s - _FASTER * step_s) * token.later_tokens
    return token.due_s + min(lag * token.tpot_s, gained_s)


def _urgency(prompt: NextPrompt, now_s: float, token_s: float) -> float:
    """From 0 to 1: how much a prompt needs the time of others to keep its bound."""
    bounds = prompt.bounds
    if not bounds.first_due_s or not bounds.first_s:
        return 0.0
    left = (bounds.first_due_s - now_s - prompt.missing_tokens * token_s) / bounds.first_s
    if left < _LATEST:
        return 0.0
    return min(1.0, max(0.0, (1.0 - left - _URGENT_FROM) / (_URGENT_TO - _URGENT_FROM)))
