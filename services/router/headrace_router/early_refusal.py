"""Refuses a request on arrival or when it is placed, if its first token is predicted to come too late.

    time to first token = time since arrival + wait for a decode slot + wait in the prefill queue + prefill

The prefill queue counts only for a prompt that placement sends there. The time of the prefill is that of the missing
tokens, by the mean time model of the prefill workers. Where decode makes the first token, that of their hand-over is
added. Both are 0 while no worker has reported one within 30 s. Among workers of both roles it is what placement has
predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from headrace_common.durations import seconds_from_duration
from headrace_common.errors import FirstTokenLate
from headrace_common.time_model.model import TimeModel
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.attempt import AdmittedRequest
from headrace_router.dispatch.dispatcher import PolicySource
from headrace_router.dispatch.messages import BY_DECODE, first_token_maker
from headrace_router.placement import Decision
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefix_cache.cached_prompts import CachedPrompts
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import NO_TIMES

# Refused requests teach workers nothing. So a time that was learned in a bad moment is forgotten.
_AGE_MAX_S: Final = 30.0
_ERROR_MAX: Final = 0.25
"""Of a time to first token that placement has predicted."""
RETRY_S_MIN: Final = 0.05
RETRY_S_MAX: Final = 60.0
DEADLINE: Final = "deadline"
REQUEST_TARGET: Final = "ttft_target"
POLICY_TARGET: Final = "policy"
_TEXTS: Final = {
    DEADLINE: "the deadline",
    REQUEST_TARGET: "the request's ttft_target",
    POLICY_TARGET: "the policy's ttft_target",
}


class FirstTokenBound(NamedTuple):
    """The time to first token that a request allows, from its arrival.

    `name` is what sets the bound: DEADLINE, REQUEST_TARGET or POLICY_TARGET.
    """

    allowed_s: float
    name: str


@dataclass(frozen=True, slots=True)
class FirstTokenPrediction:
    """The parts of a predicted time to first token. `elapsed_s` is the time since the request's arrival.

    The token may well come `error_s` earlier.
    """

    elapsed_s: float
    slot_wait_s: float
    queue_wait_s: float
    prefill_s: float
    error_s: float = 0.0

    @property
    def total_s(self) -> float:
        """From the arrival to the first token."""
        return self.elapsed_s + self.slot_wait_s + self.queue_wait_s + self.prefill_s


def predicted(
    elapsed_s: float, decision: Decision, first_s: float, times: TimeModel
) -> FirstTokenPrediction:
    """By the time to first token of a placement, on a worker with these times."""
    prefill_s = min(first_s, times.step_s(decision.missing_tokens) or 0.0)
    error_s = first_s * min(_ERROR_MAX, times.steps.error_p90)
    return FirstTokenPrediction(elapsed_s, 0.0, first_s - prefill_s, prefill_s, error_s)


def is_late(prediction: FirstTokenPrediction, bound: FirstTokenBound) -> bool:
    """Whether the first token would come after the bound, even if it comes early."""
    return prediction.total_s - prediction.error_s > bound.allowed_s


def refusal(prediction: FirstTokenPrediction, bound: FirstTokenBound) -> FirstTokenLate:
    """The error for a prediction that is late.

    Its retry delay is the time by which the prediction exceeds the bound. Waits shrink by that much if no other request
    arrives. There is none when the prefill alone takes too long: then no later moment is better.
    """
    over_s = prediction.total_s - bound.allowed_s
    hopeless = prediction.prefill_s > bound.allowed_s
    remedy = (
        "shorten the prompt, or allow more time"
        if hopeless
        else "send the request again later, or allow more time"
    )
    return FirstTokenLate(
        f"the first token would come after about {prediction.total_s:.2f} s, and {_TEXTS[bound.name]} "
        f"allows {bound.allowed_s:.2f} s; {remedy}",
        metadata={
            "bound": bound.name,
            "allowed_s": f"{bound.allowed_s:.3f}",
            "predicted_s": f"{prediction.total_s:.3f}",
            **{name: f"{part_s:.3f}" for name, part_s in asdict(prediction).items()},
        },
        retry_after_s=None if hopeless else min(RETRY_S_MAX, max(RETRY_S_MIN, over_s)),
    )


@dataclass(frozen=True, slots=True)
class EarlyRefusal:
    """Refuses requests by their deadline or their target. Without either it does nothing.

    Answers that have begun elsewhere are not refused, and neither are further answers to a prompt. Methods raise
    FirstTokenLate. `by_deadline`: whether deadlines refuse requests, beside the targets.
    """

    queue: PrefillQueue
    workers: WorkerDirectory
    prefixes: CachedPrompts
    policy: PolicySource
    by_deadline: bool
    on_prediction: Callable[[float, str], None]
    """Gets the predicted seconds from arrival to first token, and the served model."""
    on_refusal: Callable[[str, str], None]
    """Gets the served model and the name of the bound."""

    def check_arrival(self, request: AdmittedRequest) -> None:
        """Refuses a request for which the wait for a decode slot and the prefill take too long.

        Without a wait, the request is placed at once, and `check_placed` decides.
        """
        bound = self._bound(request)
        if bound is None:
            return
        slot_wait_s = request.permit.expected_slot_wait_s(request.prepared.model)
        if slot_wait_s > 0:
            prediction = self._predict(request, bound, slot_wait_s)
            if is_late(prediction, bound):
                self._predicted(request, bound, prediction)

    def check_placed(self, request: AdmittedRequest, decision: Decision) -> None:
        """Refuses a request by its first placement."""
        bound = self._bound(request)
        if bound is None:
            return
        table = self.workers.table(request.prepared.model)
        if decision.first_s is not None and table.times.age_s <= _AGE_MAX_S:
            load = table.load(decision.worker.ref)
            times = NO_TIMES if load is None else load.times
            prediction = predicted(request.elapsed_s, decision, decision.first_s, times)
        else:
            prediction = self._predict(request, bound, decision=decision)
        self._predicted(request, bound, prediction)

    def _predicted(
        self, request: AdmittedRequest, bound: FirstTokenBound, prediction: FirstTokenPrediction
    ) -> None:
        """Records a prediction. Raises FirstTokenLate when it is beyond the bound."""
        model = request.prepared.model
        self.on_prediction(prediction.total_s, model)
        request.record.predicted(prediction.total_s, bound.allowed_s, bound.name)
        if is_late(prediction, bound):
            self.on_refusal(model, bound.name)
            raise refusal(prediction, bound)

    def _predict(
        self,
        request: AdmittedRequest,
        bound: FirstTokenBound,
        slot_wait_s: float = 0.0,
        decision: Decision | None = None,
    ) -> FirstTokenPrediction:
        """The cached tokens of other workers than that of the decision are looked up where they may matter."""
        prepared = request.prepared
        times = self.queue.mean_times(prepared.model, _AGE_MAX_S)
        cached_tokens = 0 if decision is None else decision.cached_tokens
        queue_wait_s, sent_bytes = 0.0, 0.0
        if decision is not None and decision.remote:
            wait_s = self.queue.wait_s(prepared.model, prepared.priority, prepared.tenant)
            # The error of a full queue has a hint of its own.
            queue_wait_s = wait_s if math.isfinite(wait_s) else 0.0
            if first_token_maker(prepared, self.policy(), 0, 1) == BY_DECODE:
                sent_bytes = decision.missing_tokens * decision.worker.layout.token_bytes

        def predict(cached_tokens: int) -> FirstTokenPrediction:
            missing_tokens = max(0, len(prepared.token_ids) - 1 - cached_tokens)
            prefill_s = times.step_s(missing_tokens, prior_tokens=cached_tokens) or 0.0
            if prefill_s and sent_bytes:
                prefill_s += times.handover_s(sent_bytes) or 0.0
            return FirstTokenPrediction(request.elapsed_s, slot_wait_s, queue_wait_s, prefill_s)

        prediction = predict(cached_tokens)
        if is_late(prediction, bound):
            most = self._cached_tokens(prepared)
            if most > cached_tokens:
                prediction = predict(most)
        return prediction

    def _bound(self, request: AdmittedRequest) -> FirstTokenBound | None:
        if request.prepared.generated or request.prepared.cached_on is not None:
            return None
        bounds: list[FirstTokenBound] = []
        policy = self.policy()
        own_s = request.prepared.ttft_target_s
        if own_s is not None:
            bounds.append(FirstTokenBound(own_s, REQUEST_TARGET))
        elif policy.HasField("ttft_target"):
            bounds.append(FirstTokenBound(seconds_from_duration(policy.ttft_target), POLICY_TARGET))
        if self.by_deadline:
            allowed_s = request.elapsed_s + request.deadline.remaining_s()
            bounds.append(FirstTokenBound(allowed_s, DEADLINE))
        return min(bounds, default=None)

    def _cached_tokens(self, prepared: PreparedRequest) -> int:
        """The prompt tokens in the prefix cache of the worker that has the most."""
        prefixes, prompt = self.prefixes, (prepared.prefix_ids, prepared.cache_salt)
        table = self.workers.table(prepared.model)
        refs = set().union(*self.queue.workers.pulling(prepared.adapter).values())
        by_prefill = prefixes.cached_refs(prepared.model, *prompt, refs)
        return int(max((*prefixes.cached_tokens(table, *prompt), *by_prefill.values()), default=0))
