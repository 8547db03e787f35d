"""The client: asks a router, again when told to, and past it where that is allowed."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc
import grpc.aio

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_client.channels import Channels
from headrace_client.direct import DirectAttempt
from headrace_client.requests import build_request
from headrace_common.channel import open_channel
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, InvalidRequest, WorkerGone
from headrace_common.status import error_from_rpc

_LOG = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S: Final = 300.0
_JITTER_SHARE: Final = 0.25


class Client:
    """Calls one router, at "host:port" or over a channel that the caller opened and closes.

    `look_aside` allows streaming from decode workers directly. It is used for requests that want `tokens_only`, because
    text is made by the router alone, when the router allows it and the workers can be reached; an attempt that fails
    before its first token is made again by the router. A refusal that says when to come again is followed up to
    `retries_max` times, within the request's time.
    """

    def __init__(
        self,
        router: str | grpc.aio.Channel,
        *,
        api_key: str = "",
        look_aside: bool = False,
        retries_max: int = 5,
        name: str = "",
        hint: str = "is it running?",
    ) -> None:
        """`name` and `hint` are for errors: what to call the router, and what to do when it does not answer."""
        self._endpoint = name or (router if isinstance(router, str) else "this channel")
        self._hint = hint
        channel = open_channel(router) if isinstance(router, str) else router
        self._own = channel if isinstance(router, str) else None
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._look_aside = look_aside
        self._retries_max = retries_max
        self._workers = Channels()
        self.direct_answers = 0
        """Answers that came past the router."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes every channel that this client opened; answers on their way end with an error."""
        await self._workers.close()
        if self._own is not None:
            await self._own.close()

    def generate(
        self,
        prompt: str = "",
        *,
        messages: Iterable[tuple[str, str]] = (),
        tokens: Sequence[int] = (),
        model: str = "",
        max_tokens: int = 0,
        temperature: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        tokens_only: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """The answer piece by piece, as `stream` gives it. The prompt is as for build_request."""
        request = build_request(
            prompt,
            messages=messages,
            tokens=tokens,
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop=stop,
        )
        return self.stream(request, timeout_s, tokens_only=tokens_only)

    async def stream(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        tokens_only: bool = False,
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """The answer piece by piece, the last with the finish reason. With `tokens_only` there may be no text.

        Raises HeadraceError. Ending the iteration gives the request up.
        """
        deadline = Deadline.after(timeout_s)
        for retries_left in range(self._retries_max, -1, -1):
            started = False
            try:
                async for response in self._attempt(request, deadline, tokens_only):
                    started = True
                    yield response
                return
            except HeadraceError as error:
                delay_s = _retry_delay_s(error)
                if started or not retries_left or delay_s is None:
                    raise
                if delay_s >= deadline.remaining_s():
                    raise
            await asyncio.sleep(delay_s)

    async def route(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        explain: bool = False,
    ) -> inference_pb2.RouteResponse:
        """Where the prompt would go. Raises HeadraceError."""
        with rpc_errors(f"the router on {self._endpoint}", self._hint):
            return await self._stub.Route(
                inference_pb2.RouteRequest(request=request, explain=explain),
                timeout=timeout_s,
                metadata=self._metadata,
            )

    async def _attempt(
        self, request: inference_pb2.GenerateRequest, deadline: Deadline, tokens_only: bool
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if tokens_only and self._look_aside and not self._workers.out_of_reach:
            begin_s = time.monotonic()
            routed = await self.route(request, deadline.remaining_s())
            started = False
            try:
                async for response in self._directly(routed, deadline, begin_s):
                    started = True
                    yield response
            except HeadraceError as error:
                if started or isinstance(error, InvalidRequest) or deadline.expired:
                    raise
                _LOG.info("the router is asked to generate: %s", error.detail)
            if started:
                return
        with rpc_errors(f"the router on {self._endpoint}", self._hint):
            call = self._stub.Generate(
                request, timeout=deadline.remaining_s(), metadata=self._metadata
            )
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    async def _directly(
        self, routed: inference_pb2.RouteResponse, deadline: Deadline, begin_s: float
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Nothing when the router does not allow it."""
        if not routed.HasField("direct"):
            return
        with rpc_errors(f"decode worker {routed.worker_id}"):
            async with self._workers.to(routed.direct.endpoint) as channel:
                attempt = DirectAttempt(
                    routed.direct,
                    routed.worker_id,
                    decode=channel,
                    router=self._stub,
                    router_metadata=self._metadata,
                    deadline=deadline,
                    begin_s=begin_s,
                )
                async for response in attempt.responses():
                    if response.finish_reason:
                        self.direct_answers += 1
                    yield response


def _retry_delay_s(error: HeadraceError) -> float | None:
    """When to come again; None when the error does not say, or is none that time helps with."""
    if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or error.retry_after_s is None:
        return None
    return error.retry_after_s * random.uniform(1.0, 1.0 + _JITTER_SHARE)


@contextmanager
def rpc_errors(what: str, hint: str = "is it running?") -> Iterator[None]:
    """Raises Headrace's own error for an RPC that failed, saying what was called when nobody answered."""
    try:
        yield
    except grpc.aio.AioRpcError as rpc_error:
        error = error_from_rpc(rpc_error)
        # Whoever answers sends details of its own.
        if isinstance(error, WorkerGone) and "grpc_code" in error.metadata:
            raise WorkerGone(
                f"{what} does not answer ({error.detail}): {hint}", metadata={"called": what}
            ) from rpc_error
        raise error from rpc_error
