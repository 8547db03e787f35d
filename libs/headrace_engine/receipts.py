"""What each request costs its engine: a share of each of its steps, and the KV that it holds meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Final, NamedTuple

from headrace_common.time_model.model import StepTimes


class StepColumns(NamedTuple):
    """The requests of a step, and the tokens of each before it.

    `prompt_tokens` are those that it computes of each prompt, 0 for an answer. Empty: all are answers.
    """

    request_ids: Sequence[str] = ()
    context_tokens: Sequence[int] = ()
    prompt_tokens: Sequence[int] = ()

    def only(self, kept: Sequence[bool]) -> StepColumns:
        """Those requests alone."""
        return StepColumns(
            tuple(compress(self.request_ids, kept)),
            tuple(compress(self.context_tokens, kept)),
            tuple(compress(self.prompt_tokens, kept)),
        )


NO_REQUESTS: Final = StepColumns()


def shares(step: StepColumns, times: StepTimes, duration_s: float) -> list[float]:
    """The seconds of each request of a step, which add up to its duration.

    They are as the learned times of their parts. Requests share equally what a step takes in any case, and prompts by
    their tokens what any prompt takes. Each token counts the same while nothing is learned.
    """
    count = len(step.request_ids)
    fixed_s = times.fixed_s / max(1, count)
    answer_s, context_s = fixed_s + times.s_per_answer, times.s_per_context_token
    prompts = step.prompt_tokens
    if prompts:
        token_s = times.prompt_s / max(1, sum(prompts)) + times.s_per_prompt_token
        attended_s = times.s_per_attended_token
        weights = [
            fixed_s + tokens * (token_s + attended_s * (context + tokens / 2))
            if tokens
            else answer_s + context_s * context
            for tokens, context in zip(prompts, step.context_tokens, strict=True)
        ]
    else:
        weights = [answer_s + context_s * context for context in step.context_tokens]
    if not (total_s := sum(weights)):
        weights = [max(1.0, tokens) for tokens in prompts] or [1.0] * count
        total_s = sum(weights)
    return [duration_s * (weight / total_s) for weight in weights]


@dataclass(slots=True)
class RequestCost:
    """What one request has cost one engine.

    `kv_token_s` adds up the tokens that it has in KV memory in each step, times the step's seconds.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_token_s: float = 0.0
    computed_tokens: int = 0
    """Those of prompts."""

    def generated(self, share_s: float, kv_token_s: float) -> None:
        """A step has generated a token of it."""
        self.decode_s += share_s
        self.kv_token_s += kv_token_s

    def computed(self, share_s: float, kv_token_s: float, tokens: int) -> None:
        """A step has computed tokens of its prompt."""
        self.prefill_s += share_s
        self.kv_token_s += kv_token_s
        self.computed_tokens += tokens


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Seconds of an engine since its start: without a request in a step, and in steps.

    `billed_s` of `computing_s` are in the receipts of requests that have ended. The rest belongs to requests that run,
    or to none that has got a receipt.
    """

    idle_s: float = 0.0
    computing_s: float = 0.0
    billed_s: float = 0.0


class CostLedger:
    """The costs of an engine's requests. One thread calls all methods, and any thread may read `time`."""

    def __init__(self) -> None:
        self._costs: dict[str, RequestCost] = {}
        self.time = EngineTime()

    def request_added(self, request_id: str) -> None:
        """The engine has this request, until it is billed or dropped."""
        self._costs[request_id] = RequestCost()

    def idled(self, seconds: float) -> None:
        """The engine has computed no request for so long."""
        self.time = replace(self.time, idle_s=self.time.idle_s + seconds)

    def step_took(self, step: StepColumns, times: StepTimes, duration_s: float) -> None:
        """A step has computed these requests. Those that have ended meanwhile have no share."""
        self.time = replace(self.time, computing_s=self.time.computing_s + duration_s)
        known = self._costs
        try:
            costs = [known[one] for one in step.request_ids]
        except KeyError:
            step = step.only([one in known for one in step.request_ids])
            costs = [known[one] for one in step.request_ids]
        parts = zip(costs, shares(step, times, duration_s), step.context_tokens, strict=True)
        if not step.prompt_tokens:
            for cost, share_s, context in parts:
                cost.generated(share_s, context * duration_s)
            return
        for (cost, share_s, context), tokens in zip(parts, step.prompt_tokens, strict=True):
            if tokens:
                cost.computed(share_s, (context + tokens) * duration_s, tokens)
            else:
                cost.generated(share_s, context * duration_s)

    def bill(self, request_id: str) -> RequestCost:
        """A request has ended, and gets its receipt. Empty the second time."""
        cost = self._costs.pop(request_id, None) or RequestCost()
        billed_s = self.time.billed_s + cost.prefill_s + cost.decode_s
        self.time = replace(self.time, billed_s=billed_s)
        return cost

    def drop(self, request_id: str) -> None:
        """A request has ended without a receipt."""
        self._costs.pop(request_id, None)
