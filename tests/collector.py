"""A collector of metrics over OTLP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)

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


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Runs a collector and yields it with the endpoint for services."""
    collector = Collector()
    server = grpc.aio.server()
    add: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)
