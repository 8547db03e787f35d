"""Metrics, which OpenTelemetry exports to a collector every 5 s."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from opentelemetry.metrics import Meter, NoOpMeterProvider
from opentelemetry.sdk.resources import Resource

from headrace_common.telemetry.exporter import EXPORT_TIMEOUT_S, SHUTDOWN_TIMEOUT_S

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

_INTERVAL_MS: Final = 5_000


class Metrics:
    """The metrics of one process. Without a collector they are not recorded."""

    def __init__(self, resource: Resource, otlp_endpoint: str) -> None:
        self._provider = _provider(resource, otlp_endpoint) if otlp_endpoint else None
        self.meter: Meter = (self._provider or NoOpMeterProvider()).get_meter("headrace")

    def force_flush(self) -> None:
        """Exports now. Blocks for up to about 1 s."""
        if self._provider is not None:
            self._provider.force_flush(round(1_000 * EXPORT_TIMEOUT_S))

    def shutdown(self) -> None:
        """Exports a last time and stops. Blocks for less than 2 s, also without a response."""
        if self._provider is None:
            return
        thread = threading.Thread(
            target=self._provider.shutdown, name="metrics-shutdown", daemon=True
        )
        thread.start()
        thread.join(SHUTDOWN_TIMEOUT_S)


def _provider(resource: Resource, otlp_endpoint: str) -> MeterProvider:
    # Imported here, so that processes without a collector start faster.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(
        endpoint=otlp_endpoint,
        insecure=not otlp_endpoint.startswith("https://"),
        timeout=EXPORT_TIMEOUT_S,
    )
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=_INTERVAL_MS)
    return MeterProvider([reader], resource, shutdown_on_exit=False)
