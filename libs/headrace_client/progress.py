"""The progress of one answer, over all attempts."""

from __future__ import annotations

import time

from headrace.inference.v1 import inference_pb2
from headrace_client.latency import complete_latency


class Progress:
    """A request and the tokens received so far."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request = request
        self.generated = list(request.generated.ids)
        self.begin_s = time.monotonic()
        self.first_s = 0.0
        """Time of the first token by time.monotonic; 0 before it."""
        self._call_s = 0.0

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
        """Records the tokens of a response. Adds what the router has not seen to its latency."""
        if response.token_ids:
            self.first_s = self.first_s or time.monotonic()
            self.generated += response.token_ids
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
