"""What the prefill workers of a queue have learned of their times. Pure."""

from __future__ import annotations

import math
from typing import Final

from headrace_common.time_model.model import TimeModel, mean_model
from headrace_kv.layout import WorkerRef

_MEAN_AGE_S: Final = 0.5
_PRICED_TOKENS: Final = 512


class PrefillTimes:
    """What the prefill workers of one layout have learned.

    The mean of hundreds of workers is computed again at an interval, and not for each placement.
    """

    def __init__(self) -> None:
        self._models: dict[WorkerRef, TimeModel] = {}
        self._reported_s = -math.inf
        self._mean = TimeModel()
        self._token_s = 0.0
        self._mean_due_s = -math.inf

    def report(self, ref: WorkerRef, model: TimeModel, now_s: float) -> None:
        """Replaces what a worker has learned. Other links than those of `model` stay."""
        self._reported_s = now_s
        if model.steps.knows_prompts:
            if not self._models:
                self._mean_due_s = -math.inf
            known = self._models.get(ref)
            self._models[ref] = model if known is None else model.with_links_of(known)

    def remove(self, ref: WorkerRef) -> None:
        """Forgets a worker."""
        self._models.pop(ref, None)

    def prefill_s(
        self, tokens: float, prior_tokens: float, now_s: float, age_max_s: float = math.inf
    ) -> float:
        """How long the mean worker computes `tokens` of a prompt after `prior_tokens` of it.

        0 before a worker knows, and when the last report is older than `age_max_s`.
        """
        if now_s - self._reported_s > age_max_s:
            return 0.0
        self._update_mean(now_s)
        return self._mean.step_s(tokens, prior_tokens=prior_tokens) or 0.0

    def token_s(self, now_s: float) -> float:
        """The same for a token of a usual prompt."""
        self._update_mean(now_s)
        return self._token_s

    def _update_mean(self, now_s: float) -> None:
        if now_s >= self._mean_due_s:
            self._mean = mean_model(self._models.values())
            self._token_s = (self._mean.step_s(_PRICED_TOKENS) or 0.0) / _PRICED_TOKENS
            self._mean_due_s = now_s + _MEAN_AGE_S

    def handover_s(self, payload_bytes: float) -> float:
        """How long the mean worker hands bytes over after computing. 0 without bytes, and while unknown."""
        return (self._mean.handover_s(payload_bytes) or 0.0) if payload_bytes else 0.0

    def handover_tokens(
        self, ref: WorkerRef, payload_bytes: float, link: str, now_s: float
    ) -> float:
        """How many tokens are computed in the time of a worker's hand-over to decode worker `link`. 0 while unknown."""
        model, token_s = self._models.get(ref), self.token_s(now_s)
        if model is None or token_s <= 0:
            return 0.0
        return (model.handover_s(payload_bytes, link) or 0.0) / token_s
