"""The gRPC services of the trace store: OTLP to fill it, TraceService to show it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

from headrace.inference.v1 import trace_pb2, trace_pb2_grpc
from headrace_router.tracing.store import TraceStore

OTLP_SERVICE_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"

SpanReceiver: TypeAlias = Callable[[Iterable[otlp_pb2.ResourceSpans]], None]


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Passes the workers' spans to every receiver. Workers send every span to every router."""

    def __init__(self, *receivers: SpanReceiver) -> None:
        self._receivers = receivers

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for receive in self._receivers:
            receive(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


class TraceReader(trace_pb2_grpc.TraceServiceServicer):
    """Shows the traces."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def GetTrace(
        self,
        request: trace_pb2.GetTraceRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_pb2.GetTraceResponse:
        """One trace, with the spans that have arrived."""
        trace = await asyncio.to_thread(self._store.get, request.id)
        return trace_pb2.GetTraceResponse(trace=trace)

    async def ListTraces(
        self,
        request: trace_pb2.ListTracesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_pb2.ListTracesResponse:
        """The stored traces, newest first."""
        traces, token = await asyncio.to_thread(
            self._store.list_page, request.page_size, request.page_token
        )
        return trace_pb2.ListTracesResponse(traces=traces, next_page_token=token)
