"""The client: asks a router, again when told to, and past it where that is allowed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc
import grpc.aio

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_client.channels import Channels
from headrace_client.direct import DirectAttempt
from headrace_client.progress import Progress
from headrace_client.requests import build_request
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, InternalError, InvalidRequest, WorkerGone
from headrace_common.rpc.channel import TlsFiles, open_channel
from headrace_common.rpc.status import error_from_rpc

_LOG = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S: Final = 300.0
_PLAINTEXT: Final = TlsFiles()
_JITTER_SHARE: Final = 0.25
# A worker's failure costs one; then the router goes on by itself.
_DIRECT_ATTEMPTS_MAX: Final = 3


class Client:
    """Calls one router, at "host:port" or over a channel that the caller opened and closes.

    `look_aside` allows streaming from decode workers directly. It is used for requests that want `tokens_only`, because
    text is made by the router alone, when the router allows it and the workers can be reached. When a worker fails, the
    answer goes on after the tokens that came: at another worker, by the router's word, or else by the router. A refusal
    that says when to come again is followed up to `retries_max` times, within the request's time.
    """

    def __init__(
        self,
        router: str | grpc.aio.Channel,
        *,
        api_key: str = "",
        tls: TlsFiles = _PLAINTEXT,
        look_aside: bool = False,
        retries_max: int = 5,
        name: str = "",
        hint: str = "is it running?",
    ) -> None:
        """`tls` is for the router and the decode workers alike, but not for a channel that is given.

        `name` and `hint` are for errors: what to call the router, and what to do when it does not answer.
        Raises ConfigError for files of `tls` that cannot be read.
        """
        self._endpoint = name or (router if isinstance(router, str) else "this channel")
        self._hint = hint
        channel = open_channel(router, tls) if isinstance(router, str) else router
        self._own = channel if isinstance(router, str) else None
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._look_aside = look_aside
        self._retries_max = retries_max
        self._workers = Channels(tls)
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
        progress = Progress(request)
        for retries_left in range(self._retries_max, -1, -1):
            try:
                async for response in self._attempt(progress, deadline, tokens_only):
                    yield response
                return
            except HeadraceError as error:
                delay_s = _retry_delay_s(error)
                if not retries_left or delay_s is None:
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
        avoid_worker_ids: Sequence[str] = (),
    ) -> inference_pb2.RouteResponse:
        """Where the prompt would go; to workers to be avoided only when there is no other. Raises HeadraceError."""
        with rpc_errors(f"the router on {self._endpoint}", self._hint):
            return await self._stub.Route(
                inference_pb2.RouteRequest(
                    request=request, explain=explain, avoid_worker_ids=avoid_worker_ids
                ),
                timeout=timeout_s,
                metadata=self._metadata,
            )

    async def _attempt(
        self, progress: Progress, deadline: Deadline, tokens_only: bool
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """The rest of the answer, to its end."""
        if tokens_only and self._look_aside:
            async for response in self._past_the_router(progress, deadline):
                yield progress.take(response)
                if response.finish_reason:
                    return
        with rpc_errors(f"the router on {self._endpoint}", self._hint):
            call = self._stub.Generate(
                progress.rest, timeout=deadline.remaining_s(), metadata=self._metadata
            )
            try:
                async for response in call:
                    yield progress.take(response)
            finally:
                call.cancel()

    async def _past_the_router(
        self, progress: Progress, deadline: Deadline
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Tokens from one decode worker after the other; ends early where the router is to go on.

        A worker that fails before it has brought a token leaves the answer to the router.
        """
        for _ in range(_DIRECT_ATTEMPTS_MAX):
            if self._workers.out_of_reach:
                return
            routed = await self.route(
                progress.rest, deadline.remaining_s(), avoid_worker_ids=progress.failed
            )
            if not routed.HasField("direct"):
                return
            had = len(progress.generated)
            try:
                async for response in self._directly(routed, progress, deadline):
                    yield response
                return
            except HeadraceError as error:
                brought = len(progress.generated) > had
                # What a worker calls a bug would be one on the next worker too.
                if isinstance(error, InvalidRequest) or deadline.expired:
                    raise
                if brought and isinstance(error, InternalError):
                    raise
                _LOG.info("%s, so the answer goes on elsewhere", error.detail)
                progress.failed.append(routed.worker_id)
                if not brought:
                    return

    async def _directly(
        self, routed: inference_pb2.RouteResponse, progress: Progress, deadline: Deadline
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        with rpc_errors(f"decode worker {routed.worker_id}"):
            async with self._workers.to(routed.direct.endpoint) as channel:
                attempt = DirectAttempt(
                    routed.direct,
                    routed.worker_id,
                    progress,
                    decode=channel,
                    router=self._stub,
                    router_metadata=self._metadata,
                    deadline=deadline,
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
