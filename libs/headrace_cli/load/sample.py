"""What was measured of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


class RequestFailure(Exception):
    """A request without a complete answer. `name` is short, for counting."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


@dataclass(slots=True)
class RequestSample:
    """Times in seconds after the start of the run, by the client's clock.

    `planned_s`: when the request should have been sent. `arrivals_s`: times of the messages with tokens. `failure`: the
    failure's name, empty for a complete answer.
    """

    planned_s: float
    start_s: float
    arrivals_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str = ""
    detail: str = ""

    def count(self, prompt_tokens: int, output_tokens: int) -> None:
        """Records the server's counts."""
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens

    def fail(self, failure: RequestFailure) -> None:
        """Records that the answer is not complete."""
        self.failure, self.detail = failure.name, failure.detail

    def end(self, now_s: float) -> None:
        """Records the end of the answer."""
        self.end_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token. None before it."""
        return self.arrivals_s[0] - self.start_s if self.arrivals_s else None

    @property
    def e2el_s(self) -> float:
        """Time to the end of the answer."""
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time for each token after the first, as in vllm bench serve. None for an answer of one token."""
        if len(self.arrivals_s) < 2 or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between messages with tokens."""
        return [b - a for a, b in pairwise(self.arrivals_s)]
