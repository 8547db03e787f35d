"""What each request costs its engine: a share of each of its steps, and the KV that it holds meanwhile.

The requests of a step share its time as the learned times of their parts. They share equally what a step takes in any
case, and prompts by their tokens what any prompt takes. While nothing is learned, each token counts the same.

The share of an answer is linear in its context, which grows by a token with each of its steps. So one set of sums over
the steps serves all answers, and each is booked by what they have grown since it joined.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace_common.time_model.model import Step, StepTimes


class StepColumns(NamedTuple):
    """The answers of a step, with the tokens of each before it, and its prompts."""

    request_ids: Sequence[str] = ()
    context_tokens: Sequence[int] = ()
    prompts: Sequence[tuple[str, int, int]] = ()
    """Of each, its tokens before the step, and those that are computed in it."""

    def as_step(self, sending: Container[str] = ()) -> Step:
        """What the time model counts. The KV of requests in `sending` is sent."""
        prompts = self.prompts
        return Step(
            sum(tokens for *_, tokens in prompts),
            sum(tokens * (context + tokens / 2) for _, context, tokens in prompts),
            len(self.request_ids),
            sum(self.context_tokens),
            sum(tokens for name, _, tokens in prompts if name in sending),
        )


NO_REQUESTS: Final = StepColumns()


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

    def add(self, prefill_s: float, decode_s: float, kv_token_s: float, tokens: int) -> None:
        """Steps have computed so many tokens of its prompt, or generated some."""
        self.prefill_s += prefill_s
        self.decode_s += decode_s
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


class _Sums(NamedTuple):
    """Over the steps with answers: of an answer in each of them, which has no context in the first one.

    With `context` tokens there, its share is `share_s` and `context` times `per_context_s`. Likewise `kv_token_s` with
    `step_s`.
    """

    steps: int = 0
    share_s: float = 0.0
    per_context_s: float = 0.0
    kv_token_s: float = 0.0
    step_s: float = 0.0


class CostLedger:
    """The costs of an engine's requests. One thread calls all methods, and any thread may read the seconds."""

    def __init__(self) -> None:
        self._costs: dict[str, RequestCost] = {}
        self._sums = _Sums()
        self._joined: dict[str, tuple[int, _Sums]] = {}
        """Of each answer, what its context would be in the first step, which may be below 0, and the sums before it."""
        self._context_tokens = 0
        """Of all these answers, in their next step."""
        self.idle_s = self.computing_s = self.billed_s = 0.0
        """See EngineTime."""

    def request_added(self, request_id: str) -> None:
        """The engine has this request, until it is billed or dropped."""
        self._costs[request_id] = RequestCost()

    def idled(self, seconds: float) -> None:
        """The engine has computed no request for so long."""
        self.idle_s += seconds

    def step_took(self, step: StepColumns, times: StepTimes, duration_s: float) -> None:
        """A step has computed these requests. Those that have ended meanwhile have no share."""
        self.computing_s += duration_s
        costs = self._costs
        prompts = [
            (costs[one], before, count) for one, before, count in step.prompts if one in costs
        ]
        answers = self._follow(step.request_ids, step.context_tokens) if step.request_ids else 0
        fixed_s = times.fixed_s / max(1, answers + len(prompts))
        answer_s, context_s = fixed_s + times.s_per_answer, times.s_per_context_token
        weights: list[float] = []
        if prompts:
            token_s = (
                times.prompt_s / sum(tokens for *_, tokens in prompts) + times.s_per_prompt_token
            )
            attended_s = times.s_per_attended_token
            weights = [
                fixed_s + tokens * (token_s + attended_s * (context + tokens / 2))
                for _, context, tokens in prompts
            ]
        context_tokens = self._context_tokens if answers else 0
        total_s = sum(weights) + answers * answer_s + context_tokens * context_s
        if not total_s:
            answer_s, context_s, weights = 1.0, 0.0, [float(tokens) for *_, tokens in prompts]
            total_s = sum(weights) + answers
        for (cost, context, tokens), weight in zip(prompts, weights, strict=True):
            cost.add(duration_s * (weight / total_s), 0.0, (context + tokens) * duration_s, tokens)
        if answers:
            steps, share_s, per_context_s, kv_token_s, step_s = self._sums
            answer_share_s = duration_s * (answer_s / total_s)
            context_share_s = duration_s * (context_s / total_s)
            self._sums = _Sums(
                steps + 1,
                share_s + answer_share_s + context_share_s * steps,
                per_context_s + context_share_s,
                kv_token_s + duration_s * steps,
                step_s + duration_s,
            )
            self._context_tokens += answers

    def _follow(self, request_ids: Sequence[str], context_tokens: Sequence[int]) -> int:
        """From now on these answers share the sums, with so many tokens before the next one. Returns how many exist."""
        joined, names = self._joined, set(request_ids)
        # Drafts let the context of an answer grow by several tokens, and never by none.
        if joined.keys() != names or self._context_tokens != sum(context_tokens):
            for name in joined.keys() - names:
                self._leave(name)
            for name, context in zip(request_ids, context_tokens, strict=True):
                if name in joined:
                    if joined[name][0] + self._sums.steps == context:
                        continue
                    self._leave(name)
                if name in self._costs:
                    self._join(name, context)
        return len(joined)

    def _join(self, request_id: str, context: int) -> None:
        if not self._joined:
            # Sums of few steps are exact.
            self._sums = _Sums()
        self._joined[request_id] = context - self._sums.steps, self._sums
        self._context_tokens += context

    def _leave(self, request_id: str) -> None:
        """Books what the sums have of an answer."""
        context, before = self._joined.pop(request_id)
        now = self._sums
        self._context_tokens -= context + now.steps
        decode_s = (
            now.share_s - before.share_s + context * (now.per_context_s - before.per_context_s)
        )
        kv_token_s = now.kv_token_s - before.kv_token_s + context * (now.step_s - before.step_s)
        # Rounding may leave less than nothing.
        self._costs[request_id].add(0.0, max(0.0, decode_s), max(0.0, kv_token_s), 0)

    def bill(self, request_id: str) -> RequestCost:
        """A request has ended, and gets its receipt. Empty the second time."""
        cost = self._end(request_id) or RequestCost()
        self.billed_s += cost.prefill_s + cost.decode_s
        return cost

    def drop(self, request_id: str) -> None:
        """A request has ended without a receipt."""
        self._end(request_id)

    def _end(self, request_id: str) -> RequestCost | None:
        if request_id in self._joined:
            self._leave(request_id)
        return self._costs.pop(request_id, None)
