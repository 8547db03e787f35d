"""Collects what a router knows when a request arrives, and refuses the request if its first token would be late."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.telemetry import schema
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.request import ArrivedRequest
from headrace_router.dispatch.dispatcher import PolicySource, PrefixSource
from headrace_router.early_refusal.prediction import (
    DEADLINE,
    POLICY_TARGET,
    REQUEST_TARGET,
    FirstTokenBound,
    FirstTokenPrediction,
    is_late,
    refusal,
    tightest_bound,
)
from headrace_router.placement import PlacementRequest, RoutePolicy, remote_wanted
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.workers.directory import WorkerDirectory

# Refused requests teach workers nothing. So a time that was learned in a bad moment is forgotten.
_AGE_MAX_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class EarlyRefusalParts:
    """The parts of a router that predictions need.

    `by_deadline`: whether deadlines refuse requests, beside the targets.
    """

    queue: PrefillQueue
    workers: WorkerDirectory
    prefixes: PrefixSource
    policy: PolicySource
    by_deadline: bool
    predict_s: Callable[[PreparedRequest, Deadline, int], float | None]
    """Seconds from now to the first token, among workers of both roles. None where it is not known."""
    on_prediction: Callable[[str, float], None]
    """Gets the served model and the predicted seconds from arrival to first token."""
    on_refusal: Callable[[str, str], None]
    """Gets the served model and the name of the bound."""


class EarlyRefusal:
    """Refuses requests by their deadline or their target. Without either it does nothing."""

    def __init__(self, parts: EarlyRefusalParts) -> None:
        self._parts = parts

    def check(self, request: ArrivedRequest, slot_wait_s: float) -> None:
        """Raises FirstTokenLate. `slot_wait_s` is the expected wait for a decode slot.

        Answers that have begun elsewhere are not refused, and neither are further answers to a prompt.
        """
        prepared = request.prepared
        if prepared.generated or prepared.cached_on is not None:
            return
        bound = self._bound(request)
        if bound is None:
            return
        timed_s = self._parts.predict_s(prepared, request.deadline, request.arrival_ns)
        if timed_s is not None:
            prediction = FirstTokenPrediction(request.elapsed_s, slot_wait_s, 0.0, timed_s)
        else:
            prediction = self._predict_by_tokens(request, slot_wait_s, bound)
        self._parts.on_prediction(prepared.model, prediction.total_s)
        if request.root.is_recording():
            request.root.set_attributes(_attributes(prediction, bound))
        if is_late(prediction, bound):
            self._parts.on_refusal(prepared.model, bound.name)
            raise refusal(prediction, bound)

    def _predict_by_tokens(
        self, request: ArrivedRequest, slot_wait_s: float, bound: FirstTokenBound
    ) -> FirstTokenPrediction:
        """Looks for cached tokens only where they may matter."""
        prediction = self._predict(request, slot_wait_s, cached_tokens=0)
        if is_late(prediction, bound):
            cached_tokens = self._cached_tokens(request.prepared)
            if cached_tokens:
                prediction = self._predict(request, slot_wait_s, cached_tokens)
        return prediction

    def _bound(self, request: ArrivedRequest) -> FirstTokenBound | None:
        bounds: list[FirstTokenBound] = []
        policy = self._parts.policy.policy
        own_s = request.prepared.ttft_target_s
        if own_s is not None:
            bounds.append(FirstTokenBound(own_s, REQUEST_TARGET))
        elif policy.HasField("ttft_target"):
            bounds.append(FirstTokenBound(seconds_from_duration(policy.ttft_target), POLICY_TARGET))
        if self._parts.by_deadline:
            allowed_s = request.elapsed_s + request.deadline.remaining_s()
            bounds.append(FirstTokenBound(allowed_s, DEADLINE))
        return tightest_bound(tuple(bounds))

    def _predict(
        self, request: ArrivedRequest, slot_wait_s: float, cached_tokens: int
    ) -> FirstTokenPrediction:
        parts, prepared = self._parts, request.prepared
        missing_tokens = max(0, len(prepared.token_ids) - 1 - cached_tokens)
        return FirstTokenPrediction(
            elapsed_s=request.elapsed_s,
            slot_wait_s=slot_wait_s,
            queue_wait_s=self._queue_wait_s(request, missing_tokens),
            prefill_s=parts.queue.prefill_s(
                prepared.model, missing_tokens, cached_tokens, _AGE_MAX_S
            ),
        )

    def _queue_wait_s(self, request: ArrivedRequest, missing_tokens: int) -> float:
        """The wait in the prefill queue. 0 for a prompt that placement would leave to its decode worker."""
        parts, prepared = self._parts, request.prepared
        wait_s = parts.queue.wait_s(prepared.model, prepared.priority, prepared.tenant)
        policy = RoutePolicy.from_proto(parts.policy.policy)
        # The error of a full queue has a hint of its own.
        if not math.isfinite(wait_s) or missing_tokens < max(1, policy.local_prefill_max_tokens):
            return 0.0
        if not any(parts.queue.pulling_workers(prepared.adapter).values()):
            return 0.0
        placed = PlacementRequest(
            model=prepared.model,
            prompt_tokens=len(prepared.token_ids),
            prefill_placement=prepared.placement,
            policy=policy,
            remaining_s=request.deadline.remaining_s(),
        )
        remote, _ = remote_wanted(placed, wait_s)
        return wait_s if remote else 0.0

    def _cached_tokens(self, prepared: PreparedRequest) -> int:
        """The prompt tokens in the prefix cache of the worker that has the most."""
        prefixes, prompt = self._parts.prefixes, (prepared.token_ids, prepared.cache_salt)
        table = self._parts.workers.table(prepared.model)
        refs = set().union(*self._parts.queue.pulling_workers(prepared.adapter).values())
        by_prefill = prefixes.cached_refs(prepared.model, *prompt, refs)
        return int(max((*prefixes.cached_tokens(table, *prompt), *by_prefill.values()), default=0))


def _attributes(prediction: FirstTokenPrediction, bound: FirstTokenBound) -> dict[str, str | float]:
    return {
        schema.ATTRIBUTE_PREDICTED_FIRST_TOKEN_S: round(prediction.total_s, 6),
        schema.ATTRIBUTE_ALLOWED_FIRST_TOKEN_S: round(bound.allowed_s, 6),
        schema.ATTRIBUTE_FIRST_TOKEN_BOUND: bound.name,
    }
