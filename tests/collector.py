"""Collectors of metrics and of spans over OTLP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Sample = tuple[str, tuple[tuple[str, str], ...]]


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the newest value of every metric by name and attributes, and of histograms the count."""

    def __init__(self) -> None:
        self.values: dict[Sample, float] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in getattr(metric, metric.WhichOneof("data")).data_points:
                        attributes = tuple((a.key, a.value.string_value) for a in point.attributes)
                        counted = metric.WhichOneof("data") == "histogram"
                        value = point.count if counted else point.as_int or point.as_double
                        self.values[metric.name, attributes] = value
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def value(self, name: str, **attributes: str) -> float | None:
        return self.values.get((name, tuple(attributes.items())))

    def total(self, name: str, **attributes: str) -> float:
        """The sum over all series with these attributes, whatever further attributes they have."""
        wanted = set(attributes.items())
        return sum(
            value for (at, has), value in self.values.items() if at == name and wanted <= set(has)
        )


class SpanReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span by trace id, in hex."""

    def __init__(self) -> None:
        self.traces: dict[str, list[Span]] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.traces.setdefault(span.trace_id.hex(), []).append(span)
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def receiving_spans() -> AsyncIterator[tuple[SpanReceiver, str]]:
    """Runs a collector of spans, which takes metrics too, and yields it with the endpoint for services."""
    receiver = SpanReceiver()
    async with _serving(Collector(), receiver) as endpoint:
        yield receiver, endpoint


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Runs a collector and yields it with the endpoint for services."""
    collector = Collector()
    async with _serving(collector) as endpoint:
        yield collector, endpoint


@asynccontextmanager
async def _serving(
    collector: Collector, receiver: SpanReceiver | None = None
) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_metrics: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_metrics(collector, server)
    if receiver is not None:
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)
