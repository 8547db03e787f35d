"""Refuses callers without the role that an RPC needs, before its handler runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from headrace_common.access.authorizer import Authorizer
from headrace_common.access.roles import Caller, set_current_caller
from headrace_common.errors import HeadraceError
from headrace_common.rpc.handlers import Context, Continuation, Handler, guarded, rejecting


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Checks the caller of every RPC. `current_caller` returns the caller to the handler.

    A token stands in the metadata, so a caller that it excludes is refused before gRPC reads the request. A certificate
    is known later: gRPC then has read and parsed the request of a unary RPC.
    """

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        try:
            caller = self._authorizer.caller_of_metadata(
                method, handler_call_details.invocation_metadata
            )
        except HeadraceError as error:
            return rejecting(handler, error)
        if caller is not None:
            return guarded(handler, lambda _: _calling(caller))
        return self._guarded_by_certificate(handler, method)

    def _guarded_by_certificate(self, handler: Handler, method: str) -> Handler:
        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            caller = self._authorizer.caller_of_certificate(method, context.auth_context())
            set_current_caller(caller)
            yield

        return guarded(handler, guard)


@asynccontextmanager
async def _calling(caller: Caller) -> AsyncIterator[None]:
    set_current_caller(caller)
    yield
