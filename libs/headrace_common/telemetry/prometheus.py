"""Writes metrics in Prometheus's text format. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from opentelemetry.sdk.metrics.export import Histogram, HistogramDataPoint, MetricsData, Sum

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NO_NAME = re.compile(r"[^a-zA-Z0-9_:]")


def prometheus_text(data: MetricsData | None) -> str:
    """The metrics of all scopes. Dots in names become underscores, and counters end with _total."""
    if data is None:
        return ""
    lines: list[str] = []
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                lines += _metric_lines(metric.name, metric.data)
    return "".join(f"{line}\n" for line in lines)


def _metric_lines(name: str, data: Any) -> Iterator[str]:
    name = _NO_NAME.sub("_", name)
    kind = "gauge"
    if isinstance(data, Histogram):
        kind = "histogram"
    elif isinstance(data, Sum) and data.is_monotonic:
        kind = "counter"
        name += "_total"
    yield f"# TYPE {name} {kind}"
    for point in data.data_points:
        if isinstance(point, HistogramDataPoint):
            yield from _histogram_lines(name, point)
        else:
            yield f"{name}{_labels(point.attributes)} {point.value}"


def _histogram_lines(name: str, point: HistogramDataPoint) -> Iterator[str]:
    count = 0
    for bound, inside in zip((*point.explicit_bounds, "+Inf"), point.bucket_counts, strict=True):
        count += inside
        yield f"{name}_bucket{_labels(point.attributes, le=str(bound))} {count}"
    yield f"{name}_sum{_labels(point.attributes)} {point.sum}"
    yield f"{name}_count{_labels(point.attributes)} {point.count}"


def _labels(attributes: Mapping[str, Any] | None, **more: str) -> str:
    pairs = {_NO_NAME.sub("_", name): str(value) for name, value in (attributes or {}).items()}
    texts = [f'{name}="{_escaped(value)}"' for name, value in {**pairs, **more}.items()]
    return f"{{{','.join(texts)}}}" if texts else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
