"""Set-up of telemetry. Spans go to routers and to an OTLP collector, metrics only to the collector."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import (
    ReadableSpan,
    SpanProcessor,
    SynchronousMultiSpanProcessor,
    TracerProvider,
)
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from headrace_common.config import ServiceConfig, parse_sampler
from headrace_common.telemetry.exporter import (
    EXPORT_TIMEOUT_S,
    SHUTDOWN_TIMEOUT_S,
    CollectorExporter,
)
from headrace_common.telemetry.later import SCOPE
from headrace_common.telemetry.metrics.process import Metrics
from headrace_common.telemetry.schema_tables import SPAN_KINDS

QUEUED_SPANS_MAX: Final = 8_192
_BATCH_SPANS: Final = 512
_EXPORT_INTERVAL_S: Final = 1.0
"""An export costs as much as the spans of several requests."""
_PARENT_BASED: Final = "parentbased_"
_IDS: Final = RandomIdGenerator()

SpanEvent: TypeAlias = tuple[str, int, Mapping[str, AttributeValue]]
"""A name, a time in Unix nanoseconds, and attributes."""


class Telemetry:
    """The spans and metrics of one process, made by init_telemetry.

    Those of one of several workers of the process have their own `provider`, with the same processors.
    """

    def __init__(
        self,
        provider: TracerProvider,
        processors: SynchronousMultiSpanProcessor,
        collector: CollectorExporter,
        metrics: Metrics,
        sampling: Sampling,
        owned: list[tuple[SpanProcessor, Callable[[], None]]] | None = None,
    ) -> None:
        """`owned`: the processors with exporters, and how to stop each exporter."""
        self.metrics = metrics
        self.provider = provider
        self._tracer = provider.get_tracer(SCOPE)
        self._processors = processors
        self._collector = collector
        self._sampling = sampling
        self._owned = [] if owned is None else owned
        self._starting = threading.Lock()
        self._has_collector = False

    def for_worker(self, worker_id: str) -> Telemetry:
        """The telemetry of one of several workers of this process. Its spans have the worker's id."""
        resource = self.provider.resource.merge(Resource({"service.instance.id": worker_id}))
        provider = _new_provider(resource, self.provider.sampler, self._processors)
        shared = (self._processors, self._collector, self.metrics, self._sampling, self._owned)
        return Telemetry(provider, *shared)

    def set_collectors(self, endpoints: Sequence[str]) -> None:
        """Replaces the "host:port" of the collectors, which are the routers."""
        self._collector.set_endpoints(endpoints)
        with self._starting:
            if endpoints and not self._has_collector:
                self._has_collector = True
                self.add_exporter(self._collector)

    def add_exporter(self, exporter: SpanExporter) -> None:
        """Adds an exporter of every sampled span that ends from now on, in batches."""
        processor = BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUED_SPANS_MAX,
            schedule_delay_millis=1e3 * _EXPORT_INTERVAL_S,
            max_export_batch_size=_BATCH_SPANS,
        )
        self._owned.append((processor, exporter.shutdown))
        self.add_processor(processor)

    def add_collector(self, endpoint: str) -> None:
        """Exports every span that ends from now on to an OTLP endpoint, "http://HOST:PORT" or with https."""
        # Imported here, so that processes without a collector start faster.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        insecure = not endpoint.startswith("https://")
        self.add_exporter(OTLPSpanExporter(endpoint, insecure, timeout=EXPORT_TIMEOUT_S))

    def add_processor(self, processor: SpanProcessor) -> None:
        """`processor` receives every span that ends from now on, at once."""
        self._processors.add_span_processor(processor)

    def start_span(
        self,
        name: str,
        parent: Context | Span | None = None,
        *,
        attributes: Mapping[str, AttributeValue] | None = None,
        start_unix_ns: int | None = None,
    ) -> Span:
        """A span with the parent `parent`, or the span in it, or else the current one. A root without one."""
        context = trace.set_span_in_context(parent) if isinstance(parent, Span) else parent
        caller = trace.get_current_span(context).get_span_context()
        if caller.is_valid and not caller.trace_flags.sampled and self._sampling.follows_parent:
            # So does the SDK's sampler, which takes three times as long.
            return trace.NonRecordingSpan(child_context(caller))
        return self._tracer.start_span(
            name,
            context,
            kind=SPAN_KINDS.get(name, SpanKind.INTERNAL),
            attributes=attributes,
            start_time=start_unix_ns,
        )

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
        """Records a span that has ended. A nonempty `error` means that it failed."""
        span = self.start_span(name, parent, attributes=attributes, start_unix_ns=start_unix_ns)
        for event, unix_ns, details in events:
            span.add_event(event, details, unix_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(max(start_unix_ns, end_unix_ns))

    def root_context(self) -> tuple[SpanContext, SpanContext | None]:
        """The ids of a span that is made later, in the trace of the current span or in its own. Then its parent.

        They are as the provider's sampler would decide, which takes three times as long.
        """
        context, parent = get_current(), trace.INVALID_SPAN_CONTEXT
        if context:
            parent = trace.get_current_span(context).get_span_context()
        # One look at a context is cheaper than one at each of its fields.
        trace_id, _, _, parent_flags, state, has_parent = parent
        flags = int(parent_flags)
        if not has_parent:
            trace_id, flags = _IDS.generate_trace_id(), TraceFlags.RANDOM_TRACE_ID
        sampled = trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._sampling.bound
        if has_parent and self._sampling.follows_parent:
            sampled = bool(flags & TraceFlags.SAMPLED)
        flags = flags | TraceFlags.SAMPLED if sampled else flags & ~TraceFlags.SAMPLED
        own = SpanContext(trace_id, _IDS.generate_span_id(), False, TraceFlags(flags), state)
        return own, parent if has_parent else None

    @property
    def exports(self) -> bool:
        """Whether there is an exporter."""
        return bool(self._owned)

    def export(self, spans: Iterable[ReadableSpan]) -> None:
        """Passes ended spans to the exporters, but to no other processor."""
        for span in spans:
            for processor, _ in self._owned:
                processor.on_end(span)

    def force_flush(self) -> None:
        """Exports every span that has ended. Blocks for up to 1 s per batch."""
        self._processors.force_flush()

    def shutdown(self) -> None:
        """Exports the remaining spans and stops. Blocks for less than 2 s, also without a response."""
        deadline_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
        self._collector.close_at(deadline_s)
        threads = [
            threading.Thread(target=processor.shutdown, name="telemetry-shutdown", daemon=True)
            for processor, _ in self._owned
        ]
        for thread in threads:
            thread.start()
        self.metrics.shutdown()
        for thread, (_, stop) in zip(threads, self._owned, strict=True):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                stop()
        self._owned.clear()


def init_telemetry(service: str, worker_id: str, config: ServiceConfig) -> Telemetry:
    """Sets up the telemetry of a process. `service` is such as "router"."""
    names = {"service.name": f"headrace-{service}", "service.instance.id": worker_id}
    resource = Resource.create(names)
    metrics = Metrics(resource, config.otlp_endpoint, readable=config.serves_metrics)
    processors = SynchronousMultiSpanProcessor()  # type: ignore[no-untyped-call]
    sampling = Sampling.from_config(config)
    provider = _new_provider(resource, sampling.sampler(), processors)
    telemetry = Telemetry(provider, processors, CollectorExporter(config), metrics, sampling)
    if config.otlp_endpoint:
        telemetry.add_collector(config.otlp_endpoint)
    return telemetry


def child_context(parent: SpanContext) -> SpanContext:
    """The ids of a child of `parent` that is made later."""
    trace_id, _, _, flags, state, _ = parent
    return SpanContext(trace_id, _IDS.generate_span_id(), False, flags, state)


class Sampling(NamedTuple):
    """Which traces are sampled: those of which the last 8 bytes of the id are below `bound`.

    A span of a sampled caller is sampled, and one of another caller is not, if it follows its parent.
    """

    bound: int
    follows_parent: bool

    @classmethod
    def from_config(cls, config: ServiceConfig) -> Sampling:
        """As the settings name it, by the names of OpenTelemetry's standard."""
        name, share = parse_sampler(config.traces_sampler)
        if not name.endswith("traceidratio"):
            share = 1.0 if name.endswith("always_on") else 0.0
        bound = TraceIdRatioBased.get_bound_for_rate(share)
        return cls(bound, name.startswith(_PARENT_BASED))

    def sampler(self) -> Sampler:
        """The SDK's sampler that decides so."""
        sampler = TraceIdRatioBased(self.bound / (TraceIdRatioBased.TRACE_ID_LIMIT + 1))
        return ParentBased(sampler) if self.follows_parent else sampler


def _new_provider(
    resource: Resource, sampler: Sampler, spans: SynchronousMultiSpanProcessor
) -> TracerProvider:
    # Telemetry.shutdown stops the processors, with a bound.
    return TracerProvider(sampler, resource, shutdown_on_exit=False, active_span_processor=spans)
