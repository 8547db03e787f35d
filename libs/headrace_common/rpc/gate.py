"""Checks an RPC in the order of cost: its metadata, the bytes of its request, then the request."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from headrace_common.errors import HeadraceError
from headrace_common.rpc.handlers import Continuation, Handler, rejecting, with_deserializer

Metadata: TypeAlias = Iterable[tuple[str, Any]]


class GateInterceptor(grpc.aio.ServerInterceptor):
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
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        try:
            self.check_call(method, handler_call_details.invocation_metadata or ())
        except HeadraceError as error:
            return rejecting(handler, error)
        deserialize = handler.request_deserializer or bytes

        def parse(data: bytes) -> Any:
            self.check_request(method, data)
            return deserialize(data)

        return with_deserializer(handler, parse)
