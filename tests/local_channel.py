"""A channel to a servicer in the same event loop, without gRPC: for tests in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import grpc.aio

from headrace_common.errors import HeadraceError
from headrace_common.rpc.status import rpc_error_of


class LocalContext:
    """The part of a gRPC context that servicers need."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        pass


class ScriptedCalls:
    """A channel that is each of its calls too. Tests script what a call does."""

    def called(self, *given: Any, **settings: Any) -> Any:
        """Begins a call."""
        return self

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self.called

    unary_stream = stream_unary = stream_stream = unary_unary

    async def write(self, message: Any) -> None:
        pass

    def add_done_callback(self, callback: object) -> None:
        pass

    def cancel(self) -> None:
        pass

    async def close(self, grace: float | None = None) -> None:
        pass


def _connection_lost() -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "the connection is lost")


class _Stream:
    """One streaming call, as its client sees it."""

    def __init__(self, answers: Callable[[AsyncIterator[Any]], AsyncIterator[Any]]) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._callbacks: list[Callable[[Any], None]] = []
        self._task = asyncio.create_task(self._serve(answers))

    async def _received(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()

    async def _serve(self, answers: Callable[[AsyncIterator[Any]], AsyncIterator[Any]]) -> None:
        try:
            async for answer in answers(self._received()):
                self._answers.put_nowait(answer)
        except HeadraceError as error:
            self._end(rpc_error_of(error))
        except grpc.aio.AioRpcError as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._answers.put_nowait(error)
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()

    def lose(self) -> None:
        self._task.cancel()
        self._end(_connection_lost())

    async def write(self, request: Any) -> None:
        self._requests.put_nowait(request)

    async def read(self) -> Any:
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            self._answers.put_nowait(answer)
            raise answer
        return answer

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def cancel(self) -> None:
        self._task.cancel()


class LocalChannel:
    """Calls the methods of `servicer`. Without one, it is the channel to a process that cannot be reached."""

    def __init__(self, servicer: Any = None) -> None:
        self.servicer = servicer
        self.calls: list[str] = []
        """The names of all calls, in order."""
        self._streams: list[_Stream] = []

    @property
    def channel(self) -> grpc.aio.Channel:
        return cast("grpc.aio.Channel", self)

    def cut(self) -> None:
        """Ends every stream, as when the process dies."""
        self.servicer = None
        for stream in self._streams:
            stream.lose()
        self._streams.clear()

    async def close(self) -> None:
        """The client needs the channel no more."""

    # The methods of a channel.
    def unary_unary(self, path: str, **_: Any) -> Any:
        name = path.rpartition("/")[2]

        async def call(request: Any, timeout: float | None = None, metadata: Any = ()) -> Any:
            try:
                async with asyncio.timeout(timeout):
                    return await self._method(name)(request, cast("Any", LocalContext()))
            except HeadraceError as error:
                raise rpc_error_of(error) from error

        return call

    def unary_stream(self, path: str, **_: Any) -> Any:
        name = path.rpartition("/")[2]
        return lambda request: self._opened(
            lambda _: self._method(name)(request, cast("Any", LocalContext()))
        )

    def stream_stream(self, path: str, **_: Any) -> Any:
        name = path.rpartition("/")[2]
        return lambda: self._opened(
            lambda requests: self._method(name)(requests, cast("Any", LocalContext()))
        )

    def _method(self, name: str) -> Any:
        self.calls.append(name)
        if self.servicer is None:
            raise _connection_lost()
        return getattr(self.servicer, name)

    def _opened(self, answers: Callable[[AsyncIterator[Any]], AsyncIterator[Any]]) -> _Stream:
        stream = _Stream(answers)
        self._streams.append(stream)
        return stream
