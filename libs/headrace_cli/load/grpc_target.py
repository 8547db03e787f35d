"""Sends requests over gRPC."""

from __future__ import annotations

from headrace_cli.client import RouterClient
from headrace_cli.load.run import Clock
from headrace_cli.load.sample import RequestFailure, RequestSample
from headrace_cli.load.workload import PlannedRequest
from headrace_client import build_request
from headrace_common.errors import HeadraceError


class GrpcTarget:
    """A router's gRPC API."""

    def __init__(self, router: RouterClient, model: str, timeout_s: float) -> None:
        self._router = router
        self._model = model
        self._timeout_s = timeout_s

    async def send(self, request: PlannedRequest, sample: RequestSample, clock: Clock) -> None:
        """See Target."""
        message = build_request(
            request.text,
            messages=request.messages,
            tokens=request.token_ids,
            model=self._model,
            max_tokens=request.output_tokens,
            temperature=0.0,
        )
        message.sampling.ignore_eos = request.exact
        try:
            async for response in self._router.generate(message, self._timeout_s):
                if response.token_ids:
                    sample.arrivals_s.append(clock())
                if response.finish_reason:
                    usage = response.usage
                    sample.count(usage.prompt_tokens, usage.completion_tokens)
        except HeadraceError as error:
            raise RequestFailure(error.reason, error.detail) from error
        if not sample.output_tokens:
            raise RequestFailure("CUT_OFF", "the answer ended without a finish reason")
