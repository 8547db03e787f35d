"""The client for programs without asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Final, TypeVar, Unpack

from headrace.inference.v1 import inference_pb2, keep_pb2
from headrace_client.client import DEFAULT_TIMEOUT_S, LIST_TIMEOUT_S, Client
from headrace_client.requests import RequestFields, build_request
from headrace_common.access.credentials import TlsFiles

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
