"""Predicts the time to first token of a request, and decides whether that is too late. Pure.

    time to first token = time since arrival + wait for a decode slot + wait in the prefill queue + prefill

The prefill queue counts only for a prompt that placement sends there. The time of the prefill is that of the missing
tokens and of their hand-over, by the mean time model of the prefill workers. It is 0 while none has reported one within
30 s. Among workers of both roles it is what placement has predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace_common.errors import FirstTokenLate

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


@dataclass(frozen=True, slots=True)
class FirstTokenBound:
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


def tightest_bound(bounds: tuple[FirstTokenBound, ...]) -> FirstTokenBound | None:
    """The bound that allows the least time. None without bounds."""
    return min(bounds, key=lambda bound: bound.allowed_s, default=None)


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
            "elapsed_s": f"{prediction.elapsed_s:.3f}",
            "slot_wait_s": f"{prediction.slot_wait_s:.3f}",
            "queue_wait_s": f"{prediction.queue_wait_s:.3f}",
            "prefill_s": f"{prediction.prefill_s:.3f}",
        },
        retry_after_s=None if hopeless else min(RETRY_S_MAX, max(RETRY_S_MIN, over_s)),
    )
