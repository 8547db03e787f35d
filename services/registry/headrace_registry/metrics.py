"""The registry's metrics."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.resources import Resource

from headrace_common.config import ServiceConfig
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics import Metrics
from headrace_registry.store.base import Store


def start_metrics(store: Store, config: ServiceConfig) -> Metrics:
    """Exports the metrics of a registry, where otlp_endpoint is set. The caller shuts them down."""
    resource = Resource.create(
        {"service.name": "headrace-registry", "service.instance.id": config.internal_listen}
    )
    metrics = Metrics(resource, config.otlp_endpoint)

    def corrupt_records(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(store.corrupt_record_count)

    metrics.meter.create_observable_gauge(
        schema.METRIC_CORRUPT_RECORDS, [corrupt_records], "{record}"
    )
    return metrics
