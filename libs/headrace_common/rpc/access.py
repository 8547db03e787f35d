"""Refuses RPCs of another listener, callers without the role that an RPC needs, and callers beyond their bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio

from headrace_common.access.authorizer import CREDENTIAL_CHECK_S, Authorizer, Rechecked
from headrace_common.access.roles import ANONYMOUS, Caller, set_current_caller
from headrace_common.access.table import Listener, is_served
from headrace_common.callers.bounds import (
    COUNTED_BYTES,
    READS_MAX,
    REFUSED_BODY,
    CallerBounds,
    FewEach,
    current_input,
    host_of_peer,
)
from headrace_common.errors import DeadlineExceeded, HeadraceError
from headrace_common.http.bounds import BODY_WAIT_S
from headrace_common.rpc.handlers import (
    Context,
    Continuation,
    Handler,
    WrappingInterceptor,
    guarded,
    read_request,
    reading_inside,
    rejecting,
)
from headrace_common.rpc.status import parser


class ClientAccess(WrappingInterceptor):
    """Serves the RPCs of the client listener, to callers without a role. Every other RPC is UNIMPLEMENTED."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        if not is_served(handler_call_details.method, Listener.CLIENT):
            return None
        return await super().intercept_service(continuation, handler_call_details)

    def wrap(self, handler: Handler, method: str) -> Handler:
        return guarded(handler, _anonymous)


@asynccontextmanager
async def _anonymous(context: Context) -> AsyncIterator[None]:
    set_current_caller(ANONYMOUS)
    yield


class InternalAccess(grpc.aio.ServerInterceptor):
    """Checks the role of every caller of a listener with roles. `current_caller` returns the caller to the handler.

    A refused caller's request is never received: a token stands in the metadata, and where a certificate decides, gRPC
    receives the request after the check. RPCs that only another listener serves are UNIMPLEMENTED.
    """

    def __init__(
        self,
        authorizer: Authorizer,
        listener: Listener = Listener.INTERNAL,
        *,
        check_s: float = CREDENTIAL_CHECK_S,
    ) -> None:
        """The token or certificate of an open call is checked again every `check_s`."""
        self._listener = listener
        self._authorizer = authorizer
        self._check_s = check_s

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        method = handler_call_details.method
        if not is_served(method, self._listener):
            return None
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            caller = self._authorizer.caller_of_metadata(
                method, handler_call_details.invocation_metadata
            )
        except HeadraceError as error:
            return rejecting(handler, error)
        if caller is not None:
            metadata = tuple(handler_call_details.invocation_metadata or ())
            check = partial(self._authorizer.caller_of_metadata, method, metadata, again=True)
            return guarded(handler, lambda _: self._calling(caller, check))
        guard = partial(self._certified, method)
        if handler.request_streaming:
            return guarded(handler, guard)
        parse = parser(handler.request_deserializer or bytes, method)

        async def read(context: Context) -> Any:
            return parse(await read_request(context))

        return reading_inside(handler, guard, read)

    def _certified(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        check = partial(
            self._authorizer.caller_of_valid_certificate, method, context.auth_context()
        )
        return self._calling(check(), check)

    @asynccontextmanager
    async def _calling(
        self, caller: Caller, check: Callable[[], Caller | None]
    ) -> AsyncIterator[None]:
        set_current_caller(caller)
        with Rechecked(check, self._check_s):
            yield


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
        self._reading = FewEach(READS_MAX)

    def wrap(self, handler: Handler, method: str) -> Handler:
        if handler.request_streaming:
            return guarded(handler, self._bounded)
        parse = parser(handler.request_deserializer or bytes, method)

        async def read(context: Context) -> Any:
            sent = current_input()
            assert sent is not None, "a request is read in a call"
            async with self._reading.of(sent.caller):
                await sent.wait_for_room()
                data = await self._read(context)
                if len(data) >= COUNTED_BYTES:
                    sent.add(len(data))
            await self._bounds.wait_turn()
            return parse(data)

        return reading_inside(handler, self._bounded, read)

    async def _read(self, context: Context) -> bytes:
        """Raises as read_request does, and DeadlineExceeded when the request is late."""
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                return await read_request(context)
        except TimeoutError:
            self._bounds.count_refused(REFUSED_BODY, 1)
            raise DeadlineExceeded(
                f"the request did not arrive within {BODY_WAIT_S:g} s; send it at once",
                metadata={"waited_for": "the request"},
            ) from None

    @asynccontextmanager
    async def _bounded(self, context: Context) -> AsyncIterator[None]:
        host = host_of_peer(context.peer())
        metadata = context.invocation_metadata() or ()
        tenant = self._tenant_of(metadata)
        caller = caller_name(tenant, host)
        bounds = self._bounds
        with bounds.call(caller), bounds.rechecked(lambda: self._tenant_of(metadata), tenant):
            yield
