"""The progress of one answer, over all attempts."""

from __future__ import annotations

import time

from headrace.inference.v1 import inference_pb2, latency_pb2
from headrace_client.latency import DirectSteps, complete_latency
from headrace_common.latency.calls import Call


class Progress:
    """A request and the tokens received so far."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request = request
        self.generated = list(request.generated.ids)
        self.failed_worker_ids: list[str] = []
        """Decode workers that failed during a direct attempt."""
        self.attempts = 0
        """Direct attempts."""
        self.begin_s = time.monotonic()
        self.first_s = 0.0
        """Time of the first token by time.monotonic; 0 before it."""
        self._call_s = 0.0
        self.direct: DirectSteps | None = None
        """The steps of a direct attempt that makes the first token, if the client wants them."""
        self._direct_latency: latency_pb2.LatencyBreakdown | None = None
        """The sum of a direct attempt that made the first token and failed then."""

    @property
    def has_tokens(self) -> bool:
        """Whether tokens were received."""
        return self.first_s > 0

    @property
    def rest(self) -> inference_pb2.GenerateRequest:
        """The request for the rest of the answer."""
        if not self.has_tokens:
            return self._request
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.generated.ids[:] = self.generated
        return request

    def record(self, response: inference_pb2.GenerateResponse) -> None:
        """Records the tokens of a response. Adds what the router has not seen to its latency.

        An answer that a decode worker began directly has the latency of that attempt.
        """
        if response.token_ids:
            self.first_s = self.first_s or time.monotonic()
            self.generated += response.token_ids
        if self._direct_latency is not None and response.finish_reason:
            response.timing.latency.CopyFrom(self._direct_latency)
            return
        # The first token of an answer that another call began is not this call's.
        if response.timing.HasField("latency") and 0 < self._call_s <= self.first_s:
            complete_latency(
                response.timing.latency,
                round(1e6 * (self.first_s - self.begin_s)),
                round(1e6 * (self._call_s - self.begin_s)),
            )

    def record_call(self) -> None:
        """Records the start of a call to the router."""
        self._call_s = time.monotonic()

    def record_route(self, sent_ns: int, steps: latency_pb2.RouteSteps) -> None:
        """Records a Route call that was sent at `sent_ns` and has just been answered."""
        self.direct = None
        if self._request.include_latency and not self.has_tokens:
            call = Call(sent_ns, time.monotonic_ns())
            self.direct = DirectSteps(round(1e6 * self.begin_s), call, steps)

    def record_attempt(self) -> None:
        """Records the start of a direct attempt."""
        self.attempts += 1

    def record_failure(self, worker_id: str) -> None:
        """Records that a decode worker failed during a direct attempt."""
        if self.direct is not None and self.has_tokens and self._direct_latency is None:
            self._direct_latency = self.direct.latency(round(1e6 * self.first_s))
        self.failed_worker_ids.append(worker_id)
