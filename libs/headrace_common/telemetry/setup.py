"""Set-up of telemetry. Spans go to routers and to an OTLP collector, metrics only to the collector."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from headrace_common.config import ServiceConfig
from headrace_common.telemetry.exporter import (
    EXPORT_TIMEOUT_S,
    SHUTDOWN_TIMEOUT_S,
    CollectorExporter,
)
from headrace_common.telemetry.metrics.process import Metrics
from headrace_common.telemetry.otlp import readable_span
from headrace_common.telemetry.sampler import Sampler
from headrace_common.telemetry.span_queue import Export, SpanQueue
from headrace_common.telemetry.spans import (
    EndedSpan,
    SpanEvent,
    SpanSink,
    SpanSource,
    SpanTracer,
)


class Telemetry:
    """The spans and metrics of one process, made by init_telemetry.

    With `queues`, the spans of one of several workers of the process, exported with its own spans.
    """

    def __init__(
        self,
        source: SpanSource,
        collector: CollectorExporter,
        queues: Sequence[SpanQueue] = (),
        *,
        metrics: Metrics,
        sampler: Sampler | None = None,
    ) -> None:
        self.metrics = metrics
        self.tracer = SpanTracer(source, sampler or Sampler())
        self._collector = collector
        self._owned: list[tuple[SpanQueue, Callable[[], None]]] = []
        self._queues = list(queues)
        for queue in queues:
            self.add_sink(queue.add)
        if not queues:
            self._add_queue(collector.export, collector.shutdown, lambda: collector.has_endpoints)

    def for_worker(self, worker_id: str) -> Telemetry:
        """The telemetry of one of several workers of this process. Its spans have the worker's id."""
        source = _new_source(self.tracer.source.service, worker_id)
        return Telemetry(
            *(source, self._collector, self._queues),
            metrics=self.metrics,
            sampler=self.tracer.sampler,
        )

    @property
    def collectors(self) -> tuple[str, ...]:
        """The "host:port" of the collectors of every span."""
        return self._collector.endpoints

    def set_collectors(self, endpoints: Sequence[str]) -> None:
        """Replaces the "host:port" of the collectors, which are the routers."""
        self._collector.set_endpoints(endpoints)

    def add_exporter(self, exporter: SpanExporter) -> None:
        """Adds an exporter of every span that ends from now on, in batches, see SpanQueue."""

        def export(spans: Sequence[tuple[SpanSource, EndedSpan]]) -> None:
            exporter.export([readable_span(source, span) for source, span in spans])

        self._add_queue(export, exporter.shutdown)

    def add_collector(self, endpoint: str) -> None:
        """Exports every span that ends from now on to an OTLP endpoint, "http://HOST:PORT" or with https."""
        # Imported here, so that processes without a collector start faster.
        from headrace_common.telemetry.otlp_exporter import CollectorSpanExporter

        insecure = not endpoint.startswith("https://")
        exporter = CollectorSpanExporter(
            endpoint=endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S
        )
        self._add_queue(exporter.send, exporter.shutdown)

    def add_sink(self, sink: SpanSink) -> None:
        """`sink` receives every span that ends from now on, at once."""
        self.tracer.add_sink(sink)

    def _add_queue(
        self,
        export: Export,
        shutdown: Callable[[], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        queue = SpanQueue(export, wanted)
        self._queues.append(queue)
        self._owned.append((queue, shutdown))
        self.add_sink(queue.add)

    def record_span(
        self,
        name: str,
        parent: Context | Span | None,
        start_unix_ns: int,
        end_unix_ns: int,
        attributes: Mapping[str, AttributeValue] | None = None,
        error: str = "",
        events: Iterable[SpanEvent] = (),
    ) -> None:
        """Records a span that has ended. A nonempty `error` means that it failed.

        The attributes must not be changed afterwards.
        """
        times = (start_unix_ns, end_unix_ns)
        self.tracer.record(name, parent, times, attributes or {}, error, tuple(events))

    def force_flush(self) -> None:
        """Exports every span that has ended. Blocks for up to 1 s per batch."""
        for queue in self._queues:
            queue.flush()

    def shutdown(self) -> None:
        """Exports the remaining spans and stops. Blocks for less than 2 s, also without a response."""
        deadline_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
        self._collector.close_at(deadline_s)
        threads = [
            threading.Thread(target=queue.close, name="telemetry-shutdown", daemon=True)
            for queue, _ in self._owned
        ]
        for thread in threads:
            thread.start()
        self.metrics.shutdown()
        for thread, (_, shutdown) in zip(threads, self._owned, strict=True):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            shutdown()
        self._owned.clear()


def init_telemetry(service: str, worker_id: str, config: ServiceConfig) -> Telemetry:
    """Sets up the telemetry of a process. `service` is such as "router"."""
    source = _new_source(service, worker_id)
    metrics = Metrics(
        source.resource, config.otlp_endpoint, readable=bool(config.metrics_keys_file)
    )
    sampler = Sampler(config.traces_sampler, config.traces_sampler_arg)
    telemetry = Telemetry(source, CollectorExporter(config), metrics=metrics, sampler=sampler)
    if config.otlp_endpoint:
        telemetry.add_collector(config.otlp_endpoint)
    return telemetry


def _new_source(service: str, worker_id: str) -> SpanSource:
    resource = Resource.create(
        {"service.name": f"headrace-{service}", "service.instance.id": worker_id}
    )
    return SpanSource(service, worker_id, resource)
