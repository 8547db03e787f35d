"""Metrics as values of OpenTelemetry's SDK, for its exporters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Gauge as GaugeData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from headrace_common.telemetry.metrics.instruments import HistogramPoint, Labels, Snapshot

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
