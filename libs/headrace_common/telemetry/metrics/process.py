"""The metrics of one process: exported to a collector every 5 s, and read by callers as text."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Gauge as GaugeData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from headrace_common.tasks import BUGS, run_forever
from headrace_common.telemetry import schema
from headrace_common.telemetry.exporter import EXPORT_TIMEOUT_S, SHUTDOWN_TIMEOUT_S
from headrace_common.telemetry.metrics.instruments import (
    Counter,
    HistogramPoint,
    Labels,
    MetricStore,
    Snapshot,
)
from headrace_common.telemetry.metrics.prometheus import TEXT_TYPE, prometheus_text

_SCOPE = InstrumentationScope("headrace")


def metrics_data(
    resource: Resource, snapshots: Sequence[Snapshot], start_unix_ns: int
) -> MetricsData:
    """All values, counted since `start_unix_ns`."""
    times = (start_unix_ns, time.time_ns())
    metrics = [
        Metric(one.name, one.facts.meaning, one.facts.unit, _data(one, times)) for one in snapshots
    ]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(_SCOPE, metrics, "")], "")])


def _data(snapshot: Snapshot, times: tuple[int, int]) -> Sum | GaugeData | Histogram:
    temporality = AggregationTemporality.CUMULATIVE
    if snapshot.facts.instrument == "histogram":
        points = [
            _histogram_point(snapshot, values, point, times)
            for values, point in snapshot.points.items()
            if isinstance(point, HistogramPoint)
        ]
        return Histogram(points, temporality)
    numbers = [
        NumberDataPoint(_attributes(snapshot, values), *times, value)
        for values, value in snapshot.points.items()
        if not isinstance(value, HistogramPoint)
    ]
    if snapshot.facts.instrument == "counter":
        return Sum(numbers, temporality, is_monotonic=True)
    return GaugeData(numbers)


def _histogram_point(
    snapshot: Snapshot, values: Labels, point: HistogramPoint, times: tuple[int, int]
) -> HistogramDataPoint:
    exemplars = [
        Exemplar({}, one.value, round(1e9 * one.unix_s), 0, int(one.trace_id, 16))
        for one in point.exemplars
        if one is not None
    ]
    # The smallest and the largest value are not kept.
    unknown: Any = None
    start_unix_ns, end_unix_ns = times
    return HistogramDataPoint(
        attributes=_attributes(snapshot, values),
        start_time_unix_nano=start_unix_ns,
        time_unix_nano=end_unix_ns,
        count=sum(point.counts),
        sum=point.total,
        bucket_counts=point.counts,
        explicit_bounds=snapshot.facts.buckets,
        min=unknown,
        max=unknown,
        exemplars=exemplars,
    )


def _attributes(snapshot: Snapshot, values: Labels) -> Mapping[str, str]:
    return dict(zip(snapshot.labels, values, strict=True))


_LOG = logging.getLogger(__name__)

_INTERVAL_S: Final = 5.0
_SAMPLE_INTERVAL_S: Final = 1.0


class _BugCounter(Counter):
    def points(self) -> dict[Labels, float]:
        return {(): BUGS.total()}


class Metrics:
    """Owns the instruments of a process. They count always; gauges need sampling only while `has_readers`."""

    def __init__(self, resource: Resource, otlp_endpoint: str, *, readable: bool = False) -> None:
        """`readable`: whether callers may read the metrics as text."""
        self.store = MetricStore()
        self.store.include(_BugCounter(schema.METRIC_LOOP_FAILURES, ()))
        self.loop_stall = self.store.gauge(schema.METRIC_EVENT_LOOP_STALL)
        self.has_readers = readable or bool(otlp_endpoint)
        self._resource = resource
        self._exporter = _exporter(otlp_endpoint) if otlp_endpoint else None
        self._exporting = threading.Lock()
        self._closing = threading.Event()
        if self._exporter is not None:
            threading.Thread(target=self._export_forever, name="metrics", daemon=True).start()

    def text(self, kind: str = TEXT_TYPE) -> str:
        """All metrics for Prometheus. `kind` is a content type of headrace_common.telemetry.metrics.prometheus."""
        return prometheus_text(self.store.collect(), kind)

    def start_sampling(self, sample: Callable[[], None]) -> asyncio.Task[None] | None:
        """Calls `sample` every second, if the metrics have readers. The caller ends the task."""

        async def run() -> None:
            while True:
                sample()
                await asyncio.sleep(_SAMPLE_INTERVAL_S)

        return run_forever(run, "metrics") if self.has_readers else None

    def force_flush(self) -> None:
        """Exports now. Blocks for up to about 1 s."""
        exporter = self._exporter
        if exporter is None:
            return
        data = metrics_data(self._resource, self.store.collect(), self.store.start_unix_ns)
        with self._exporting:
            exporter.export(data, timeout_millis=1e3 * EXPORT_TIMEOUT_S)

    def shutdown(self) -> None:
        """Exports a last time and stops. Blocks for less than 2 s, also without a response."""
        if self._exporter is None or self._closing.is_set():
            return
        self._closing.set()
        thread = threading.Thread(target=self._end, name="metrics-shutdown", daemon=True)
        thread.start()
        thread.join(SHUTDOWN_TIMEOUT_S)

    def _export_forever(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            try:
                self.force_flush()
            except Exception:  # noqa: BLE001 - a failed export must not end the thread
                _LOG.exception("the metrics were not exported")

    def _end(self) -> None:
        self.force_flush()
        if self._exporter is not None:
            self._exporter.shutdown()


def _exporter(otlp_endpoint: str) -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(
        endpoint=otlp_endpoint,
        insecure=not otlp_endpoint.startswith("https://"),
        timeout=EXPORT_TIMEOUT_S,
    )
