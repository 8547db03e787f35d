"""A request on its way through the simulation, and what was measured of it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from headrace_kv.layout.layout import WorkerRef
from headrace_simulator.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What was measured of one request. `failure` is the reason of the error, empty after success.

    `itl_s` is the mean time between the tokens of the answer, 0 for a single token. `cached_tokens` are the prompt
    tokens that no worker computed.
    """

    request: TraceRequest
    arrival_s: float
    ttft_s: float = math.inf
    itl_s: float = math.inf
    e2e_s: float = math.inf
    cached_tokens: int = 0
    failure: str = ""

    @property
    def end_s(self) -> float:
        """When the answer ended."""
        return self.arrival_s + self.e2e_s

    def meets(self, ttft_s: float, itl_s: float) -> bool:
        """Whether the request reached both goals."""
        return not self.failure and self.ttft_s <= ttft_s and self.itl_s <= itl_s


class Job:
    """One request. `token_words` and `hashes` are those of the whole blocks of its prompt."""

    def __init__(self, request: TraceRequest, token_words: bytes, hashes: list[int]) -> None:
        self.request = request
        self.token_words = token_words
        self.hashes = hashes
        self.prompt_tokens = request.prompt_tokens
        self.answer_tokens = request.answer_tokens
        self.priority = request.priority
        loop = asyncio.get_running_loop()
        self.arrival_s = loop.time()
        self.first_token_s = 0.0
        self.end_s = 0.0
        self.cached_tokens = 0
        self.compute_s = 0.0
        self.decode_worker: WorkerRef | None = None
        self.finished: asyncio.Future[None] = loop.create_future()

    @property
    def transfer_id(self) -> str:
        """Unique, since a simulated request has one attempt."""
        return f"t{self.request.number}"

    def placed(self, ref: WorkerRef) -> None:
        """A decode worker has reserved blocks."""
        self.decode_worker = ref

    def prefilled(self, cached_tokens: int, compute_s: float) -> None:
        """A worker has computed the prompt, without the cached tokens."""
        self.cached_tokens, self.compute_s = cached_tokens, compute_s

    def made_first_token(self, now_s: float) -> None:
        """The first token of the answer was generated."""
        self.first_token_s = now_s

    def made_last_token(self, now_s: float) -> None:
        """The answer is complete."""
        self.end_s = now_s
        if not self.finished.done():
            self.finished.set_result(None)

    def outcome(self) -> RequestOutcome:
        """What was measured of the complete request."""
        gaps = max(1, self.answer_tokens - 1)
        return RequestOutcome(
            self.request,
            self.arrival_s,
            ttft_s=self.first_token_s - self.arrival_s,
            itl_s=(self.end_s - self.first_token_s) / gaps,
            e2e_s=self.end_s - self.arrival_s,
            cached_tokens=self.cached_tokens,
        )

    def failed(self, reason: str) -> RequestOutcome:
        """What was measured of a request that failed."""
        return RequestOutcome(self.request, self.arrival_s, failure=reason)
