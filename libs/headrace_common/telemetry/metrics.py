"""Metrics, which OpenTelemetry exports to a collector every 5 s, and which a caller can read as text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opentelemetry.metrics import Meter, NoOpMeterProvider
from opentelemetry.sdk.resources import Resource

from headrace_common.telemetry.exporter import EXPORT_TIMEOUT_S, SHUTDOWN_TIMEOUT_S

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricReader

_INTERVAL_MS: Final = 5_000


class Metrics:
    """The metrics of one process. Without a collector, and unless they are `readable`, they are not recorded."""

    def __init__(self, resource: Resource, otlp_endpoint: str, *, readable: bool = False) -> None:
        self._reader = _text_reader() if readable else None
        self._exports = bool(otlp_endpoint)
        readers: list[MetricReader] = [] if self._reader is None else [self._reader]
        if otlp_endpoint:
            readers.append(_exporting_reader(otlp_endpoint))
        self._provider = _provider(resource, readers) if readers else None
        self.meter: Meter = (self._provider or NoOpMeterProvider()).get_meter("headrace")

    def text(self) -> str:
        """All metrics in Prometheus's text format. Empty unless they are readable."""
        if self._reader is None:
            return ""
        from headrace_common.telemetry.prometheus import prometheus_text

        return prometheus_text(self._reader.get_metrics_data())

    def force_flush(self) -> None:
        """Exports now. Blocks for up to about 1 s."""
        if self._provider is not None and self._exports:
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


# Imported here, so that processes without a reader of their metrics start faster.


def _provider(resource: Resource, readers: Sequence[MetricReader]) -> MeterProvider:
    from opentelemetry.sdk.metrics import MeterProvider

    return MeterProvider(readers, resource, shutdown_on_exit=False)


def _text_reader() -> InMemoryMetricReader:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    return InMemoryMetricReader()


def _exporting_reader(otlp_endpoint: str) -> MetricReader:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(
        endpoint=otlp_endpoint,
        insecure=not otlp_endpoint.startswith("https://"),
        timeout=EXPORT_TIMEOUT_S,
    )
    return PeriodicExportingMetricReader(exporter, export_interval_millis=_INTERVAL_MS)
