"""How much earlier the best other decision would have given the first token. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.util.types import AttributeValue

from headrace_common.latency.steps import FirstTokenBy, RequestSteps
from headrace_common.telemetry import schema
from headrace_router.placement import Decision
from headrace_router.timed_placement import OtherDecision


@dataclass(frozen=True, slots=True)
class Regret:
    """The best other decision, and by how much its first token would have been earlier. Negative: later."""

    other: OtherDecision
    gained_s: float

    def attributes(self) -> dict[str, AttributeValue]:
        """Those of the root span."""
        return {
            schema.ATTRIBUTE_OTHER_DECISION: self.other.kind,
            schema.ATTRIBUTE_OTHER_DECODE_WORKER_ID: self.other.worker.ref.worker_id,
            schema.ATTRIBUTE_OTHER_PREFILL_WORKER_ID: self.other.prefill.worker_id,
            schema.ATTRIBUTE_OTHER_GAIN_MS: round(1e3 * self.gained_s, 3),
        }


def regret_of(decision: Decision | None, steps: RequestSteps) -> Regret | None:
    """The regret of a request by its only decision. None without an estimate.

    There is none after a second attempt, and where the prefill worker or its hidden state made the first token.
    """
    if decision is None or not decision.others or len(steps.attempts) != 1:
        return None
    (attempt,) = steps.attempts
    decode, prefill = attempt.decode, attempt.prefill
    if (
        decode is None
        or decode.first_token is None
        or attempt.first_token_by != FirstTokenBy.DECODE
    ):
        return None
    prompt = decode.first_token
    if decision.remote:
        if prefill is None or prefill.compute_end is None:
            return None
        prompt = prefill.compute_end
    # Messages before that have no part in predictions, and would take as long with another decision.
    start = decode.received
    observed_s, prompt_s = (1e-6 * (at - start) for at in (decode.first_token, prompt))
    estimates = [(other.estimate_s(prompt_s), other) for other in decision.others]
    estimate_s, best = min(estimates, key=lambda pair: pair[0])
    return Regret(best, observed_s - estimate_s)
