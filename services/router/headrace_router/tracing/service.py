"""The gRPC services of the trace store: OTLP to fill it, TraceService to show it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from headrace.inference.v1 import trace_pb2, trace_pb2_grpc
from headrace_common.errors import InvalidRequest
from headrace_router.tracing.record import SpanBatch, span_batches
from headrace_router.tracing.store import TraceStore

OTLP_SERVICE_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"
# An export has at most 512 spans, which protobuf parses in half a millisecond. The worst message takes 50 ms.
EXPORT_BYTES_MAX: Final = 2 * 1024 * 1024


class SpanCollector:
    """Passes the workers' spans on. Workers send every span to every router."""

    def __init__(self, receive: Callable[[SpanBatch], None]) -> None:
        self._receive = receive

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service, with a bound on its messages that the generated code cannot express."""
        export: Any = grpc.unary_unary_rpc_method_handler(
            self._export,
            response_serializer=trace_service_pb2.ExportTraceServiceResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(OTLP_SERVICE_NAME, {"Export": export})
        server.add_generic_rpc_handlers((handler,))

    async def collect(self, export: bytes) -> None:
        """Receives an ExportTraceServiceRequest. Lets the event loop run after each batch. Raises InvalidRequest."""
        if len(export) > EXPORT_BYTES_MAX:
            raise InvalidRequest(
                {"request": f"has {len(export)} bytes; send at most {EXPORT_BYTES_MAX}"}
            )
        try:
            message = trace_service_pb2.ExportTraceServiceRequest.FromString(export)
        except DecodeError as error:
            raise InvalidRequest({"request": f"cannot be parsed ({error})"}) from error
        for batch in span_batches(message):
            self._receive(batch)
            await asyncio.sleep(0)

    async def _export(
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        await self.collect(data)
        return trace_service_pb2.ExportTraceServiceResponse()


class TraceReader(trace_pb2_grpc.TraceServiceServicer):
    """Shows the traces. Converts them in a thread, one at a time, so that readers cannot occupy every thread."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._reading = asyncio.Lock()

    async def GetTrace(
        self,
        request: trace_pb2.GetTraceRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_pb2.GetTraceResponse:
        """One trace, with the spans that have arrived."""
        async with self._reading:
            return await asyncio.to_thread(self._get, request.id)

    async def ListTraces(
        self,
        request: trace_pb2.ListTracesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_pb2.ListTracesResponse:
        """The stored traces, newest first."""
        async with self._reading:
            return await asyncio.to_thread(self._list, request.page_size, request.page_token)

    def _get(self, name: str) -> trace_pb2.GetTraceResponse:
        return trace_pb2.GetTraceResponse(trace=self._store.get(name))

    def _list(self, page_size: int, page_token: str) -> trace_pb2.ListTracesResponse:
        traces, token = self._store.list_page(page_size, page_token)
        return trace_pb2.ListTracesResponse(traces=traces, next_page_token=token)
