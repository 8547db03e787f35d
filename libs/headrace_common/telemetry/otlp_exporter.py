"""Exports spans to an OpenTelemetry collector."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from headrace_common.telemetry.otlp import export_request
from headrace_common.telemetry.spans import EndedSpan, SpanSource


class CollectorSpanExporter(OTLPSpanExporter):
    """The SDK's exporter with its settings and retries. It encodes our spans without making the SDK's of them."""

    def send(self, spans: Sequence[tuple[SpanSource, EndedSpan]]) -> None:
        """Sends a batch. Blocks up to the exporter's timeout, and logs a failure."""
        self._export(spans)  # type: ignore[arg-type]

    def _translate_data(  # type: ignore[override]
        self, data: Sequence[tuple[SpanSource, EndedSpan]]
    ) -> ExportTraceServiceRequest:
        return export_request(data)
