"""Set-up of telemetry. Spans go to routers and to an OTLP collector, metrics only to the collector."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from headrace_common.config import ServiceConfig
from headrace_common.telemetry.exporter import (
    EXPORT_TIMEOUT_S,
    SHUTDOWN_TIMEOUT_S,
    CollectorExporter,
)
from headrace_common.telemetry.metrics import Metrics

_LOG = logging.getLogger(__name__)

_BATCH_DELAY_MS = 200
_QUEUED_SPANS_MAX = 8_192


class Telemetry:
    """The spans and metrics of one process, made by init_telemetry.

    With `processors`, the spans of one of several workers of the process, exported with its own spans.
    """

    def __init__(
        self,
        service: str,
        provider: TracerProvider,
        collector: CollectorExporter,
        processors: Sequence[BatchSpanProcessor] = (),
        *,
        metrics: Metrics,
    ) -> None:
        self.metrics = metrics
        self._service = service
        self._provider = provider
        self._collector = collector
        self._processors: list[tuple[BatchSpanProcessor, SpanExporter]] = []
        self.tracer: Tracer = provider.get_tracer("headrace")
        for processor in processors:
            provider.add_span_processor(processor)
        if not processors:
            self.add_exporter(collector)

    def for_worker(self, worker_id: str) -> Telemetry:
        """The telemetry of one of several workers of this process. Its spans have the worker's id."""
        provider = _new_provider(self._service, worker_id)
        processors = [processor for processor, _ in self._processors]
        return Telemetry(self._service, provider, self._collector, processors, metrics=self.metrics)

    @property
    def collectors(self) -> tuple[str, ...]:
        """The "host:port" of the collectors of every span."""
        return self._collector.endpoints

    def set_collectors(self, endpoints: Sequence[str]) -> None:
        """Replaces the "host:port" of the collectors, which are the routers."""
        self._collector.set_endpoints(endpoints)

    def add_exporter(self, exporter: SpanExporter) -> None:
        """Adds an exporter of every span that ends from now on, in batches each 200 ms."""
        processor = BatchSpanProcessor(
            exporter, max_queue_size=_QUEUED_SPANS_MAX, schedule_delay_millis=_BATCH_DELAY_MS
        )
        self._processors.append((processor, exporter))
        self._provider.add_span_processor(processor)

    def record_span(
        self,
        name: str,
        parent_context: Context | None,
        start_unix_ns: int,
        end_unix_ns: int,
        attributes: Mapping[str, AttributeValue] | None = None,
        error: str = "",
        events: Iterable[tuple[str, int, Mapping[str, AttributeValue]]] = (),
    ) -> Span:
        """Records a span that has ended, and returns it. A nonempty `error` sets its status.

        Each of `events` has a name, a time in Unix nanoseconds, and attributes.
        """
        span = self.tracer.start_span(
            name, context=parent_context, start_time=start_unix_ns, attributes=attributes
        )
        for event, unix_ns, details in events:
            span.add_event(event, details, unix_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(max(start_unix_ns, end_unix_ns))
        return span

    def force_flush(self) -> None:
        """Exports every span that has ended. Blocks for up to 1 s per batch."""
        self._provider.force_flush()

    def shutdown(self) -> None:
        """Exports the remaining spans and stops. Blocks for less than 2 s, also without a response."""
        deadline_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
        self._collector.close_at(deadline_s)
        threads = [
            threading.Thread(target=processor.shutdown, name="telemetry-shutdown", daemon=True)
            for processor, _ in self._processors
        ]
        for thread in threads:
            thread.start()
        self.metrics.shutdown()
        for thread, (_, exporter) in zip(threads, self._processors, strict=True):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                exporter.shutdown()
        self._processors.clear()


def init_telemetry(service: str, worker_id: str, config: ServiceConfig) -> Telemetry:
    """Sets up the telemetry of a process. `service` is such as "router"."""
    provider = _new_provider(service, worker_id)
    metrics = Metrics(provider.resource, config.otlp_endpoint)
    telemetry = Telemetry(service, provider, CollectorExporter(config), metrics=metrics)
    if config.otlp_endpoint:
        telemetry.add_exporter(_otlp_exporter(config.otlp_endpoint))
    return telemetry


def _new_provider(service: str, worker_id: str) -> TracerProvider:
    resource = Resource.create(
        {"service.name": f"headrace-{service}", "service.instance.id": worker_id}
    )
    return TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False)


def _otlp_exporter(endpoint: str) -> SpanExporter:
    # Imported here, so that processes without a collector start faster.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    insecure = not endpoint.startswith("https://")
    return OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
