"""Refuses RPCs of another listener, and callers without the role that an RPC needs, before its handler runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from headrace_common.access.authorizer import CREDENTIAL_CHECK_S, Authorizer, rechecked
from headrace_common.access.roles import ANONYMOUS, Caller, set_current_caller
from headrace_common.access.table import Listener, is_served
from headrace_common.errors import HeadraceError
from headrace_common.rpc.handlers import (
    Context,
    Continuation,
    Handler,
    WrappingInterceptor,
    guarded,
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
        return guarded(handler, lambda _: _calling(ANONYMOUS))


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
        """The token or certificate of an open stream is checked again every `check_s`."""
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
            if not (handler.request_streaming or handler.response_streaming):
                return guarded(handler, lambda _: _calling(caller))
            metadata = tuple(handler_call_details.invocation_metadata or ())
            return guarded(handler, lambda _: self._calling(caller, method, metadata))
        return self._guarded_by_certificate(handler, method)

    @asynccontextmanager
    async def _calling(
        self, caller: Caller, method: str, metadata: Sequence[tuple[str, Any]]
    ) -> AsyncIterator[None]:
        set_current_caller(caller)
        check = partial(self._authorizer.caller_of_metadata, method, metadata)
        async with rechecked(check, self._check_s):
            yield

    def _guarded_by_certificate(self, handler: Handler, method: str) -> Handler:
        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            caller = self._authorizer.caller_of_certificate(method, context.auth_context())
            set_current_caller(caller)
            yield

        @asynccontextmanager
        async def guard_stream(context: Context) -> AsyncIterator[None]:
            check = partial(
                self._authorizer.caller_of_valid_certificate, method, context.auth_context()
            )
            set_current_caller(check())
            async with rechecked(check, self._check_s):
                yield

        if handler.request_streaming:
            return guarded(handler, guard_stream)
        chosen = guard_stream if handler.response_streaming else guard
        parse = parser(handler.request_deserializer or bytes, method)
        return reading_inside(handler, chosen, parse)


@asynccontextmanager
async def _calling(caller: Caller) -> AsyncIterator[None]:
    set_current_caller(caller)
    yield
