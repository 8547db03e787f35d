"""How far an answer has come, over every attempt at it."""

from __future__ import annotations

import time

from headrace.inference.v1 import inference_pb2


class Progress:
    """One request and what the client has of its answer."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request = request
        self.generated = list(request.generated.ids)
        self.failed: list[str] = []
        """Decode workers that failed while they were asked directly."""
        self.attempts = 0
        """Direct ones."""
        self.begin_s = time.monotonic()
        self.first_s = 0.0
        """When the first token came, by time.monotonic."""

    @property
    def begun(self) -> bool:
        """Whether tokens have come."""
        return self.first_s > 0

    @property
    def rest(self) -> inference_pb2.GenerateRequest:
        """What is to be asked now."""
        if not self.begun:
            return self._request
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.generated.ids[:] = self.generated
        return request

    def take(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        """Notes a response's tokens; the response."""
        if response.token_ids:
            self.first_s = self.first_s or time.monotonic()
            self.generated += response.token_ids
        return response
