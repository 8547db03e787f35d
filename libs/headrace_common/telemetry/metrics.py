"""Metrics: numbers that a collector gets every few seconds, by OpenTelemetry."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from opentelemetry.metrics import Meter, NoOpMeterProvider
from opentelemetry.sdk.resources import Resource

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

_INTERVAL_MS: Final = 5_000
_EXPORT_TIMEOUT_S: Final = 1
_SHUTDOWN_S: Final = 1.5


class Metrics:
    """The metrics of one process. Without a collector nothing is counted."""

    def __init__(self, resource: Resource, otlp_endpoint: str) -> None:
        self._provider = _provider(resource, otlp_endpoint) if otlp_endpoint else None
        self.meter: Meter = (self._provider or NoOpMeterProvider()).get_meter("headrace")

    def force_flush(self) -> None:
        """Exports now. Blocks for about a second at most."""
        if self._provider is not None:
            self._provider.force_flush(1_000 * _EXPORT_TIMEOUT_S)

    def shutdown(self) -> None:
        """Exports a last time and stops, within 2 s even when nobody takes it. Blocks."""
        if self._provider is None:
            return
        thread = threading.Thread(
            target=self._provider.shutdown, name="metrics-shutdown", daemon=True
        )
        thread.start()
        thread.join(_SHUTDOWN_S)


def _provider(resource: Resource, otlp_endpoint: str) -> MeterProvider:
    # Most processes have no collector, and need not wait for these at their start.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(
        endpoint=otlp_endpoint,
        insecure=not otlp_endpoint.startswith("https://"),
        timeout=_EXPORT_TIMEOUT_S,
    )
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=_INTERVAL_MS)
    return MeterProvider([reader], resource, shutdown_on_exit=False)
