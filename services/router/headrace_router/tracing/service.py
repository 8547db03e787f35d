"""The gRPC sides of the trace store: OTLP in, Headrace's own TraceService out."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from headrace.inference.v1 import trace_pb2, trace_pb2_grpc
from headrace_router.lookaside.tracking import DirectRequestTracker
from headrace_router.tracing.store import TraceStore

OTLP_SERVICE_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes the workers' spans."""

    def __init__(self, store: TraceStore, direct: DirectRequestTracker) -> None:
        self._store = store
        self._direct = direct

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Spans of requests that are not kept here are dropped silently: every router gets every span."""
        self._store.add(request.resource_spans)
        self._direct.on_spans(request.resource_spans)
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
        """One trace, as far as its spans have come."""
        trace = await asyncio.to_thread(self._store.get, request.id)
        return trace_pb2.GetTraceResponse(trace=trace)

    async def ListTraces(
        self,
        request: trace_pb2.ListTracesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_pb2.ListTracesResponse:
        """The kept traces, newest first."""
        traces, token = await asyncio.to_thread(
            self._store.page, request.page_size, request.page_token
        )
        return trace_pb2.ListTracesResponse(traces=traces, next_page_token=token)
