"""Traces: made with OpenTelemetry, carried over gRPC, shipped to routers and to OTLP. Metrics go to OTLP alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from headrace_common.config import ServiceConfig
from headrace_common.rpc import handlers
from headrace_common.rpc.channel import open_blocking_channel
from headrace_common.telemetry.metrics import Metrics

_LOG = logging.getLogger(__name__)

_BATCH_DELAY_MS = 200
_QUEUED_SPANS_MAX = 8_192
_EXPORT_TIMEOUT_S = 1.0
_SHUTDOWN_S = 1.5
_EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_PROPAGATOR = TraceContextTextMapPropagator()


class CollectorExporter(SpanExporter):
    """Sends each batch to every collector of the moment. One that is away misses its spans."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._failing: set[str] = set()
        self._close_unix_s = float("inf")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The collectors, in order of name."""
        with self._lock:
            return tuple(sorted(self._channels))

    def set_endpoints(self, endpoints: Sequence[str]) -> None:
        """Replaces the collectors. Channels of those that stay are kept."""
        with self._lock:
            gone = [self._channels.pop(name) for name in set(self._channels) - set(endpoints)]
            for name in endpoints:
                if name not in self._channels:
                    self._channels[name] = open_blocking_channel(name, self._config)
            self._failing &= set(endpoints)
        for channel in gone:
            channel.close()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends the spans to all collectors at once, waiting 1 s at most."""
        timeout_s = min(_EXPORT_TIMEOUT_S, self._close_unix_s - time.time())
        with self._lock:
            channels = dict(self._channels)
        if timeout_s <= 0 or not channels:
            return SpanExportResult.FAILURE if channels else SpanExportResult.SUCCESS
        request = encode_spans(spans)
        calls: dict[str, Any] = {}
        for name, channel in channels.items():
            try:
                export: grpc.UnaryUnaryMultiCallable[Any, Any] = channel.unary_unary(
                    _EXPORT_METHOD, request_serializer=ExportTraceServiceRequest.SerializeToString
                )
                calls[name] = export.future(request, timeout=timeout_s)
            except ValueError:
                _LOG.debug("collector %s was dropped during an export", name)
        delivered = [self._await(name, call) for name, call in calls.items()]
        return SpanExportResult.SUCCESS if all(delivered) else SpanExportResult.FAILURE

    def close_by(self, unix_s: float) -> None:
        """Exports after this moment are dropped at once."""
        self._close_unix_s = unix_s

    def shutdown(self) -> None:
        """Closes every channel; exports under way end."""
        self.set_endpoints(())

    def _await(self, name: str, call: Any) -> bool:
        try:
            call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            self._note_failure(name, error)
            return False
        with self._lock:
            recovered = name in self._failing
            self._failing.discard(name)
        if recovered:
            _LOG.info("collector %s takes spans again", name)
        return True

    def _note_failure(self, name: str, error: Exception) -> None:
        with self._lock:
            known = name in self._failing or name not in self._channels
            if name in self._channels:
                self._failing.add(name)
        if not known:
            reason = error.details() if isinstance(error, grpc.Call) else str(error)
            _LOG.warning("collector %s takes no spans until further notice: %s", name, reason)


class Telemetry:
    """The traces of one process, or with `processors` those of one of its workers, which leave with
    the process's own. Made by init_telemetry; passed to whoever makes spans.
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
        """Makes the spans of one of several workers of this process, which say whose they are."""
        provider = _new_provider(self._service, worker_id)
        processors = [processor for processor, _ in self._processors]
        return Telemetry(self._service, provider, self._collector, processors, metrics=self.metrics)

    @property
    def collectors(self) -> tuple[str, ...]:
        """The endpoints that get every span."""
        return self._collector.endpoints

    def set_collectors(self, endpoints: Sequence[str]) -> None:
        """Replaces the "host:port" of the routers that get every span."""
        self._collector.set_endpoints(endpoints)

    def add_exporter(self, exporter: SpanExporter) -> None:
        """Adds a receiver of every span that ends from now on, in batches at most 200 ms late."""
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
        """Makes a span after the fact and returns it, ended; `error` says what went wrong.

        `events` have a name, when it was in Unix nanoseconds, and attributes.
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
        """Exports every span that has ended. Blocks for 1 s per batch at most."""
        self._provider.force_flush()

    def shutdown(self) -> None:
        """Exports what is left and stops, within 2 s even when nobody takes it. Blocks."""
        deadline_unix_s = time.time() + _SHUTDOWN_S
        self._collector.close_by(deadline_unix_s)
        threads = [
            threading.Thread(target=processor.shutdown, name="telemetry-shutdown", daemon=True)
            for processor, _ in self._processors
        ]
        for thread in threads:
            thread.start()
        self.metrics.shutdown()
        for thread, (_, exporter) in zip(threads, self._processors, strict=True):
            thread.join(max(0.0, deadline_unix_s - time.time()))
            if thread.is_alive():
                exporter.shutdown()
        self._processors.clear()


def init_telemetry(service: str, worker_id: str, config: ServiceConfig) -> Telemetry:
    """Starts tracing for a process; `service` is such as "router"."""
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
    # Most processes have no collector, and need not wait for this at their start.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    insecure = not endpoint.startswith("https://")
    return OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_TIMEOUT_S)


def traceparent(span: Span) -> str:
    """The W3C traceparent of a span, to be stored in a message; empty for an invalid span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def context_from_traceparent(text: str) -> Context:
    """The context whose span is the one that `text` names; an empty one when it names none."""
    return _PROPAGATOR.extract({"traceparent": text}, context=Context())


def metadata_with_trace(
    metadata: Sequence[tuple[str, str | bytes]] = (), context: Context | None = None
) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata for an RPC that carries the current span, or that of `context`, to the server."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return (*metadata, *carrier.items())


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Makes the caller's span the current one while a handler runs."""

    async def intercept_service(
        self,
        continuation: handlers.Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> handlers.Handler | None:
        """Wraps the handler found by `continuation`."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return handlers.guarded(handler, _inside_callers_span)


@asynccontextmanager
async def _inside_callers_span(context: handlers.Context) -> AsyncIterator[None]:
    carrier = {
        key: value
        for key, value in context.invocation_metadata() or ()
        if key in ("traceparent", "tracestate") and isinstance(value, str)
    }
    # Never detached: each RPC runs in a task of its own, and the attachment ends with it. An
    # asynchronous generator may be closed from another task, where detaching would fail.
    otel_context.attach(_PROPAGATOR.extract(carrier, context=Context()))
    yield
