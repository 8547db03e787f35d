"""A client of one router, with retries."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, Unpack

import grpc
import grpc.aio

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, keep_pb2, latency_pb2
from headrace_client.requests import RequestFields, build_request
from headrace_common.access.credentials import TlsFiles
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import HeadraceError, WorkerGone
from headrace_common.latency.parts import Sum, TimePart, sum_from_proto, sum_to_proto
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc


def complete_latency(
    latency: latency_pb2.LatencyBreakdown, measured_us: int, retry_us: int
) -> None:
    """Extends the router's first sum to the time that the client measured.

    `retry_us` of it passed before the call that succeeded. The rest that the router has not seen is the network's.
    """
    known = sum_from_proto(latency.first_token)
    parts = dict(known.parts_us)
    missing_us = max(0, measured_us - known.total_us)
    retry_us = min(missing_us, retry_us)
    for part, more_us in ((TimePart.RETRY, retry_us), (TimePart.NETWORK, missing_us - retry_us)):
        if more_us:
            parts[part] = parts.get(part, 0) + more_us
    latency.first_token.CopyFrom(sum_to_proto(Sum(known.total_us + missing_us, parts)))


class AnswerProgress:
    """A request and the tokens received so far."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request = request
        self.generated = list(request.generated.ids)
        self.begin_s = time.monotonic()
        self.first_s = 0.0
        """Time of the first token by time.monotonic; 0 before it."""
        self._call_s = 0.0
        self._prompt_tokens = self._call_prompt_tokens = 0
        """Prompt tokens received, over all calls and in this one."""

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

        Removes prompt tokens that an earlier call brought.
        """
        if response.prompt_token_ids:
            self._record_prompt(response)
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

    def _record_prompt(self, response: inference_pb2.GenerateResponse) -> None:
        token_ids, logprobs = response.prompt_token_ids, response.prompt_logprobs
        # The first token of the prompt has none.
        without = len(token_ids) - len(logprobs)
        known = min(self._prompt_tokens - self._call_prompt_tokens, len(token_ids))
        self._call_prompt_tokens += len(token_ids)
        self._prompt_tokens = max(self._prompt_tokens, self._call_prompt_tokens)
        del token_ids[:known], logprobs[: max(0, known - without)]

    def record_call(self) -> None:
        """Records the start of a call to the router."""
        self._call_s = time.monotonic()
        self._call_prompt_tokens = 0


DEFAULT_TIMEOUT_S: Final = 300.0
LIST_TIMEOUT_S: Final = 10.0
_PLAINTEXT: Final = TlsFiles()
_JITTER_SHARE: Final = 0.25


class Client:
    """Calls one router, at "host:port" or over a channel that the caller opened and closes.

    A request that is rejected with a retry delay is retried up to `retries_max` times, within its timeout. It continues
    after the tokens received.
    """

    def __init__(
        self,
        router: str | grpc.aio.Channel,
        *,
        api_key: str = "",
        tls: TlsFiles = _PLAINTEXT,
        retries_max: int = 5,
        name: str = "",
        hint: str = "is it running?",
    ) -> None:
        """`tls` is for a channel that the client opens.

        Errors use `name` as the router's name and `hint` as the remedy when the router cannot be reached.
        Raises ConfigError for files of `tls` that cannot be read.
        """
        self._endpoint = name or (router if isinstance(router, str) else "this channel")
        self._hint = hint
        channel = open_channel(router, tls) if isinstance(router, str) else router
        self._own = channel if isinstance(router, str) else None
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._retries_max = retries_max

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel that this client opened. Answers in flight end with an error."""
        if self._own is not None:
            await self._own.close()

    def generate(
        self,
        prompt: str = "",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **fields: Unpack[RequestFields],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the answer as `stream` does. The prompt and `fields` are as for build_request."""
        return self.stream(build_request(prompt, **fields), timeout_s)

    async def models(self, timeout_s: float = LIST_TIMEOUT_S) -> list[inference_pb2.Model]:
        """The models that at least one decode worker serves. Raises HeadraceError."""
        with rpc_errors(f"the router on {self._endpoint}", self._hint):
            listed = await self._stub.ListModels(
                inference_pb2.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata
            )
        return list(listed.models)

    async def keep(
        self, promise_id: str, seconds: float = 0.0, timeout_s: float = LIST_TIMEOUT_S
    ) -> keep_pb2.Kept:
        """Lets a promise, the `usage.kept.id` of an answer, hold for `seconds` from now on; 0 ends it.

        Raises HeadraceError, NotFound for a promise that has ended.
        """
        request = inference_pb2.KeepRequest(id=promise_id, duration=duration_from_seconds(seconds))
        with rpc_errors(f"the router on {self._endpoint}", self._hint):
            answer = await self._stub.Keep(request, timeout=timeout_s, metadata=self._metadata)
        return answer.kept

    async def stream(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the answer; the last response has the finish reason.

        Raises HeadraceError. The end of the iteration cancels the request.
        """
        deadline = Deadline.after(timeout_s)
        progress = AnswerProgress(request)
        for retries_left in range(self._retries_max, -1, -1):
            try:
                async for response in self._attempt(progress, deadline):
                    yield response
                return
            except HeadraceError as error:
                delay_s = _retry_delay_s(error)
                # Only one answer can be continued.
                if not retries_left or delay_s is None or (request.n > 1 and progress.has_tokens):
                    raise
                if delay_s >= deadline.remaining_s():
                    raise
            await asyncio.sleep(delay_s)

    async def route(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> inference_pb2.RouteResponse:
        """Where the prompt would be routed, on the router's internal listener. Raises HeadraceError."""
        with rpc_errors(f"the router on {self._endpoint}", self._hint):
            return await self._stub.Route(
                inference_pb2.RouteRequest(request=request),
                timeout=timeout_s,
                metadata=self._metadata,
            )

    async def _attempt(
        self, progress: AnswerProgress, deadline: Deadline
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the rest of the answer."""
        with rpc_errors(f"the router on {self._endpoint}", self._hint):
            progress.record_call()
            call = self._stub.Generate(
                progress.rest, timeout=deadline.remaining_s(), metadata=self._metadata
            )
            try:
                async for response in call:
                    progress.record(response)
                    yield response
            finally:
                call.cancel()


def _retry_delay_s(error: HeadraceError) -> float | None:
    """The delay before a retry, with jitter. None for an error that a retry does not help."""
    if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or error.retry_after_s is None:
        return None
    return error.retry_after_s * random.uniform(1.0, 1.0 + _JITTER_SHARE)


@contextmanager
def rpc_errors(what: str, hint: str = "is it running?") -> Iterator[None]:
    """Converts a failed RPC to a HeadraceError, which names `what` when it cannot be reached."""
    try:
        yield
    except grpc.aio.AioRpcError as rpc_error:
        error = error_from_rpc(rpc_error)
        # A status of gRPC itself, without details of a service.
        if isinstance(error, WorkerGone) and "grpc_code" in error.metadata:
            raise WorkerGone(
                f"{what} does not answer ({error.detail}){hint and f': {hint}'}",
                metadata={"called": what},
            ) from rpc_error
        raise error from rpc_error


Result = TypeVar("Result")

_CLOSE_TIMEOUT_S: Final = 5.0


class SyncClient:
    """A Client on an event loop in a thread of its own. Threads may share it.

    Its arguments and methods are those of Client.
    """

    def __init__(
        self,
        router: str,
        *,
        api_key: str = "",
        tls: TlsFiles | None = None,
        retries_max: int = 5,
    ) -> None:
        """Raises ConfigError for files of `tls` that cannot be read."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="headrace-client", daemon=True
        )
        self._thread.start()
        try:
            self._client = self._run(
                _make_client(
                    router,
                    api_key=api_key,
                    tls=tls or TlsFiles(),
                    retries_max=retries_max,
                )
            )
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channels and ends the thread. Answers in flight end with an error."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._client.close(), _CLOSE_TIMEOUT_S)
        finally:
            self._end_loop()

    def generate(
        self,
        prompt: str = "",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **fields: Unpack[RequestFields],
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Streams the answer as `stream` does. The prompt and `fields` are as for build_request."""
        return self.stream(build_request(prompt, **fields), timeout_s)

    def stream(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Streams the answer; the last response has the finish reason. Closing the iterator cancels the request.

        Raises HeadraceError.
        """
        responses = self._client.stream(request, timeout_s)
        try:
            while (response := self._run(_next(responses))) is not None:
                yield response
        finally:
            self._run(_close(responses))

    def models(self, timeout_s: float = LIST_TIMEOUT_S) -> list[inference_pb2.Model]:
        """The models that at least one decode worker serves. Raises HeadraceError."""
        return self._run(self._client.models(timeout_s))

    def keep(
        self, promise_id: str, seconds: float = 0.0, timeout_s: float = LIST_TIMEOUT_S
    ) -> keep_pb2.Kept:
        """As Client.keep."""
        return self._run(self._client.keep(promise_id, seconds, timeout_s))

    def _run(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """The result of a coroutine on the loop, which is cancelled when the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _make_client(router: str, **options: Any) -> Client:
    """A client that belongs to the running loop."""
    return Client(router, **options)


async def _next(
    responses: AsyncIterator[inference_pb2.GenerateResponse],
) -> inference_pb2.GenerateResponse | None:
    return await anext(responses, None)


async def _close(responses: AsyncIterator[inference_pb2.GenerateResponse]) -> None:
    close = getattr(responses, "aclose", None)
    if close is not None:
        await close()
