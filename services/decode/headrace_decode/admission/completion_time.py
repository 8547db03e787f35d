"""Estimates how long an answer takes on this worker, from those that completed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# The weight of the latest answer in a running mean.
_LATEST_WEIGHT: Final = 0.1


@dataclass(slots=True)
class CompletionTimeEstimator:
    """Estimates tend to be too short, so that only hopeless requests exceed their deadline.

    `lead_s` is from admission to the first token. It depends on the prompt too, so it stays near the
    recent minimum. The others are running means: `token_s` is from one token to the next, and
    `answer_share` is the share of max_tokens that an answer uses.
    """

    lead_s: float = 0.0
    token_s: float = 0.0
    answer_share: float = 0.0

    def record(self, *, lead_s: float, stream_s: float, tokens: int, max_tokens: int) -> None:
        """An answer of `tokens` has completed, `stream_s` after its first token."""
        lead_s, stream_s = max(0.0, lead_s), max(0.0, stream_s)
        # Every answer has a token, so a share of 0 means that this is the first answer.
        weight = _LATEST_WEIGHT if self.answer_share else 1.0
        self.lead_s = min(lead_s, self.lead_s + weight * (lead_s - self.lead_s))
        if tokens > 1:
            token_weight = _LATEST_WEIGHT if self.token_s else 1.0
            self.token_s += token_weight * (stream_s / (tokens - 1) - self.token_s)
        self.answer_share += weight * (tokens / max_tokens - self.answer_share)

    def expected_s(self, max_tokens: int) -> float:
        """Seconds from admission to the last token of an answer; 0 before the first `record`."""
        return self.lead_s + self.answer_share * max_tokens * self.token_s
