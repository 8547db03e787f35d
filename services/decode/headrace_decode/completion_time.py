"""How long an answer takes on this worker, learned from those that ended well. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# How much of a mean the latest answer makes up.
_NEWS_SHARE: Final = 0.1


@dataclass(slots=True)
class CompletionTimeEstimator:
    """Guesses that err towards too short, so that only what is hopeless counts as such.

    `lead_s` is from admission to the first token: near the least of late, for it also depends on the prompt. The means
    are `token_s`, from one token to the next, and `answer_share`, how much of its max_tokens an answer makes use of.
    """

    lead_s: float = 0.0
    token_s: float = 0.0
    answer_share: float = 0.0

    def note(self, *, lead_s: float, stream_s: float, tokens: int, max_tokens: int) -> None:
        """One answer of `tokens` has ended, `stream_s` after its first token."""
        lead_s, stream_s = max(0.0, lead_s), max(0.0, stream_s)
        # No answer is without a token, so that 0 says that this is the first.
        news_share = _NEWS_SHARE if self.answer_share else 1.0
        self.lead_s = min(lead_s, self.lead_s + news_share * (lead_s - self.lead_s))
        if tokens > 1:
            gap_share = _NEWS_SHARE if self.token_s else 1.0
            self.token_s += gap_share * (stream_s / (tokens - 1) - self.token_s)
        self.answer_share += news_share * (tokens / max_tokens - self.answer_share)

    def expected_s(self, max_tokens: int) -> float:
        """From admission to the last token of an answer of at most `max_tokens`; 0 while nothing is known."""
        return self.lead_s + self.answer_share * max_tokens * self.token_s
