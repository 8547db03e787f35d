"""Wraps the handlers of a grpc.aio server, of all four shapes, in one context manager.

An interceptor derives from WrappingInterceptor and gives `guarded(handler, ...)` from its `wrap`. A gate checks an RPC
in the order of cost: its metadata, the bytes of its request, then the request.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import grpc.aio

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, Draining, HeadraceError, InvalidRequest
from headrace_common.rpc.field_bounds import bounded

Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]
"""Finds the handler of an RPC; None for an unknown method."""
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Guard: TypeAlias = Callable[["Context"], AbstractAsyncContextManager[None]]
"""Makes the context manager in which one RPC runs, from the RPC's context."""
Parse: TypeAlias = Callable[[bytes], Any]
"""Makes a request of its bytes. It may raise a HeadraceError."""


class WrappingInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handler of every RPC. `wrap` is called once for each handler."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        """The last handler of each method, and what `wrap` made of it."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wraps the handler that `continuation` finds."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self.wrap(handler, method))
        return known[1]

    @abstractmethod
    def wrap(self, handler: Handler, method: str) -> Handler:
        """The handler to run instead. `method` is such as "/package.Service/Method"."""


def rejecting(handler: Handler, error: Exception) -> Handler:
    """A handler that only raises `error`.

    gRPC receives the request of a unary handler before it calls it. That of a streaming handler it does not.
    """

    async def reject(requests: Any, context: Context) -> NoReturn:
        raise error

    return _unread(handler, reject)


def guarded(handler: Handler, guard: Guard, parse: Parse | None = None) -> Handler:
    """The same handler, run inside `guard(context)`. Handlers must be coroutine functions or asynchronous generators.

    `parse` makes the requests of their bytes inside the guard too, in place of the handler's deserializer.
    """
    behaviour = behaviour_of(handler)
    wrap = _wrap_generator if inspect.isasyncgenfunction(behaviour) else _wrap_coroutine
    if parse is None:
        wrapped = wrap(behaviour, guard, lambda request: request)
        return _replaced(handler, wrapped, handler.request_deserializer)
    prepare = partial(_parsed, parse) if handler.request_streaming else parse
    return _replaced(handler, wrap(behaviour, guard, prepare), None)


async def _parsed(parse: Parse, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield parse(data)


def reading_inside(
    handler: Handler, guard: Guard, read: Callable[[Context], Awaitable[Any]]
) -> Handler:
    """The same handler of a unary request, run inside `guard(context)`. `read` gets the request, inside it too."""
    behaviour = behaviour_of(handler)
    generates = inspect.isasyncgenfunction(behaviour)

    async def answer(requests: Any, context: Context) -> Any:
        async with guard(context):
            request = await read(context)
            if not generates:
                return await behaviour(request, context)
            async for response in behaviour(request, context):
                await context.write(response)
            return None

    return _unread(handler, answer)


async def read_request(context: Context) -> bytes:
    """The bytes of a unary request. Raises InvalidRequest when it has none."""
    data = await context.read()
    if data is grpc.aio.EOF:
        raise InvalidRequest({"request": "is missing: send one message"})
    assert isinstance(data, bytes)
    return data


def _unread(handler: Handler, behaviour: Callable[..., Any]) -> Handler:
    """A handler of a stream, which gRPC calls before a message has come, for responses as those of `handler`."""
    make = _MAKERS[True, handler.response_streaming]
    return make(behaviour, None, handler.response_serializer)


def behaviour_of(handler: Handler) -> Any:
    """The function of a handler: a coroutine function or an asynchronous generator."""
    return (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )


_MAKERS: Final[Mapping[tuple[bool, bool], Callable[..., Handler]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether requests are streamed, and whether responses are."""


def _replaced(handler: Handler, behaviour: Callable[..., Any], parse: Parse | None) -> Handler:
    """A handler of the same shape."""
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(behaviour, parse, handler.response_serializer)


def _wrap_generator(
    behaviour: Callable[..., Any], guard: Guard, prepare: Callable[[Any], Any]
) -> Callable[..., Any]:
    async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
        async with guard(context):
            async for response in behaviour(prepare(request), context):
                yield response

    return wrapped


def _wrap_coroutine(
    behaviour: Callable[..., Any], guard: Guard, prepare: Callable[[Any], Any]
) -> Callable[..., Any]:
    async def wrapped(request: Any, context: Context) -> Any:
        async with guard(context):
            return await behaviour(prepare(request), context)

    return wrapped


Metadata: TypeAlias = Iterable[tuple[str, Any]]


class GateInterceptor(WrappingInterceptor):
    """Rejects an RPC before gRPC receives its request, or before protobuf parses it.

    It runs inside the interceptor that converts errors.
    """

    @abstractmethod
    def check_call(self, method: str, metadata: Metadata) -> None:
        """Raises a HeadraceError to reject the RPC. `method` is such as "/package.Service/Method"."""

    @abstractmethod
    def check_request(self, method: str, data: bytes) -> None:
        """Raises InvalidRequest to reject the serialized request."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """The handler that `continuation` finds, or one that only rejects."""
        handler = await super().intercept_service(continuation, handler_call_details)
        if handler is None:
            return None
        metadata = handler_call_details.invocation_metadata or ()
        try:
            self.check_call(handler_call_details.method, metadata)
        except HeadraceError as error:
            return rejecting(handler, error)
        return handler

    def wrap(self, handler: Handler, method: str) -> Handler:
        deserialize = handler.request_deserializer or bytes

        def parse(data: bytes) -> Any:
            self.check_request(method, data)
            return deserialize(data)

        return _replaced(handler, behaviour_of(handler), parse)


class BoundsInterceptor(WrappingInterceptor):
    """Refuses messages of Headrace's services with a field beyond its bound, before the handler gets them."""

    def wrap(self, handler: Handler, method: str) -> Handler:
        if not method.startswith("/headrace.") or handler.request_deserializer is None:
            return handler
        parse = bounded(handler.request_deserializer)
        return _replaced(handler, behaviour_of(handler), parse)


# Streams that last until one end stops. Waiting for them would always use up the grace.
_ENDLESS = frozenset(
    {
        "/headrace.decode.v1.DecodeService/Link",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/headrace.registry.v1.RegistryService/KeepAlive",
        "/headrace.registry.v1.RegistryService/Watch",
        "/headrace.worker.v1.WorkerService/SubscribeKvEvents",
        "/headrace.worker.v1.WorkerService/WatchStatus",
        "/headrace.prefill.v1.PrefillQueueService/Pull",
        "/headrace.kv.v1.HandoffService/Handoff",
    }
)


class InFlightInterceptor(WrappingInterceptor):
    """Tracks RPCs in flight: answers, which end by themselves, and endless streams, which do not."""

    def __init__(self) -> None:
        super().__init__()
        self._answering: set[asyncio.Task[Any]] = set()
        self._streams: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._cancelling = False

    @property
    def answer_count(self) -> int:
        """RPCs in flight, less the endless streams."""
        return len(self._answering)

    def wrap(self, handler: Handler, method: str) -> Handler:
        tasks = self._streams if method in _ENDLESS else self._answering
        return guarded(handler, lambda _: self._track(tasks))

    async def wait_answered(self, deadline: Deadline) -> bool:
        """Waits until `answer_count` is 0. False when the deadline passes first."""
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cancel_all(self) -> None:
        """Ends every RPC with Draining, also those that the server cancels later."""
        self._cancelling = True
        for task in self._streams | self._answering:
            task.cancel()

    @asynccontextmanager
    async def _track(self, tasks: set[asyncio.Task[Any]]) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None, "grpc.aio runs every handler in a task"
        tasks.add(task)
        if self._answering:
            self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not self._cancelling:
                raise
            task.uncancel()
            raise Draining("the process is shutting down") from None
        finally:
            tasks.discard(task)
            if not self._answering:
                self._idle.set()


class EndlessStreams(WrappingInterceptor):
    """Ends streams without an end after `age_s`. Any caller may open one, and would keep its connection by it."""

    def __init__(self, age_s: float) -> None:
        super().__init__()
        self._age_s = age_s

    def wrap(self, handler: Handler, method: str) -> Handler:
        return guarded(handler, self._bound_age) if method in _ENDLESS else handler

    @asynccontextmanager
    async def _bound_age(self, context: Context) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._age_s):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"a stream without end lasts {self._age_s:g} s here; open another",
                metadata={"waited_for": "the end of the stream"},
            ) from None
