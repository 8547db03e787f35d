"""Metrics: numbers that a collector gets every few seconds, by OpenTelemetry."""

from __future__ import annotations

import threading
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

_INTERVAL_MS: Final = 5_000
_EXPORT_TIMEOUT_S: Final = 1
_SHUTDOWN_S: Final = 1.5


class Metrics:
    """The metrics of one process. Without a collector they are counted and told to nobody."""

    def __init__(self, resource: Resource, otlp_endpoint: str) -> None:
        readers = []
        if otlp_endpoint:
            exporter = OTLPMetricExporter(
                endpoint=otlp_endpoint,
                insecure=not otlp_endpoint.startswith("https://"),
                timeout=_EXPORT_TIMEOUT_S,
            )
            readers.append(
                PeriodicExportingMetricReader(exporter, export_interval_millis=_INTERVAL_MS)
            )
        self._provider = MeterProvider(readers, resource, shutdown_on_exit=False)
        self.meter: Meter = self._provider.get_meter("headrace")

    def force_flush(self) -> None:
        """Exports now. Blocks for about a second at most."""
        self._provider.force_flush(1_000 * _EXPORT_TIMEOUT_S)

    def shutdown(self) -> None:
        """Exports a last time and stops, within 2 s even when nobody takes it. Blocks."""
        thread = threading.Thread(
            target=self._provider.shutdown, name="metrics-shutdown", daemon=True
        )
        thread.start()
        thread.join(_SHUTDOWN_S)
