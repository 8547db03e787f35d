"""Applies the bounds on callers to gRPC's client listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from headrace_common.callers.bounds import REFUSED_BODY, CallerBounds
from headrace_common.callers.hosts import host_of_peer
from headrace_common.errors import DeadlineExceeded, InvalidRequest
from headrace_common.http.bounds import BODY_WAIT_S
from headrace_common.rpc.handlers import (
    Context,
    Handler,
    WrappingInterceptor,
    behaviour_of,
    guarded,
    is_generator,
)
from headrace_common.rpc.status import parser

TenantOf: TypeAlias = Callable[[Iterable[tuple[str, Any]]], str]
"""The tenant of an RPC's metadata. Empty for a caller without a known key."""


def caller_name(tenant: str, host: str) -> str:
    """The name of a caller in the bounds: its tenant, or else its host."""
    return f"tenant:{tenant}" if tenant else host


class CallerInterceptor(WrappingInterceptor):
    """Counts the calls of each caller, and lets its requests be parsed in turns.

    gRPC receives a request only once its call is within the bounds: it sees handlers of streams, which it calls before
    a request has come. Use it inside the interceptor that converts errors, and outside all that reject calls.
    """

    def __init__(self, bounds: CallerBounds, tenant_of: TenantOf) -> None:
        super().__init__()
        self._bounds = bounds
        self._tenant_of = tenant_of

    def wrap(self, handler: Handler, method: str) -> Handler:
        if handler.request_streaming:
            return guarded(handler, self._bounded)
        behaviour, bounds = behaviour_of(handler), self._bounds
        parse = parser(handler.request_deserializer or bytes, method)
        generates = is_generator(handler)

        async def answer(_: Any, context: Context) -> Any:
            async with self._bounded(context):
                data = await _first(context, bounds)
                await bounds.wait_turn()
                request = parse(data)
                if not generates:
                    return await behaviour(request, context)
                async for response in behaviour(request, context):
                    await context.write(response)
                return None

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @asynccontextmanager
    async def _bounded(self, context: Context) -> AsyncIterator[None]:
        host = host_of_peer(context.peer())
        metadata = context.invocation_metadata() or ()
        tenant = self._tenant_of(metadata)
        caller = caller_name(tenant, host)
        with self._bounds.call(caller):
            async with self._bounds.rechecked(lambda: self._tenant_of(metadata), tenant):
                yield


async def _first(context: Context, bounds: CallerBounds) -> bytes:
    """The bytes of a unary request. Raises InvalidRequest when it has none, and DeadlineExceeded when it is late."""
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            data = await context.read()
    except TimeoutError:
        bounds.count_refused(REFUSED_BODY, 1)
        raise DeadlineExceeded(
            f"the request did not arrive within {BODY_WAIT_S:g} s; send it at once",
            metadata={"waited_for": "the request"},
        ) from None
    if data is grpc.aio.EOF:
        raise InvalidRequest({"request": "is missing: send one message"})
    assert isinstance(data, bytes)
    return data
