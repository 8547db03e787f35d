"""Writes metrics in Prometheus's text format and in OpenMetrics. Pure.

Names become such as `headrace_queue_expected_wait_seconds`: dots are underscores, then follow the unit and, for
counters, `_total`. OpenMetrics has exemplars: the trace of one value in each bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from headrace_common.telemetry.metrics.instruments import Exemplar, HistogramPoint, Labels, Snapshot

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_OPEN_METRICS: Final = "application/openmetrics-text"
_UNITS: Final = {"s": "seconds", "By": "bytes", "By/s": "bytes_per_second", "1": "ratio"}
_NO_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")


def content_type(accept: str) -> str:
    """The format for a reader with this Accept header: OpenMetrics, if the header names it."""
    kinds = (part.split(";")[0].strip() for part in accept.lower().split(","))
    return OPEN_METRICS_TYPE if _OPEN_METRICS in kinds else TEXT_TYPE


def prometheus_name(name: str, unit: str) -> str:
    """A metric's name without `_total`."""
    plain = _NO_NAME.sub("_", name)
    suffix = _UNITS.get(unit, "")
    return plain if not suffix or plain.endswith(f"_{suffix}") else f"{plain}_{suffix}"


def prometheus_text(snapshots: Sequence[Snapshot], kind: str = TEXT_TYPE) -> str:
    """All metrics, by name. `kind` is TEXT_TYPE or OPEN_METRICS_TYPE."""
    open_metrics = kind == OPEN_METRICS_TYPE
    lines: list[str] = []
    for snapshot in sorted(snapshots, key=lambda one: one.name):
        lines += _metric_lines(snapshot, open_metrics=open_metrics)
    if open_metrics:
        lines.append("# EOF")
    return "".join(f"{line}\n" for line in lines)


def _metric_lines(snapshot: Snapshot, *, open_metrics: bool) -> Iterator[str]:
    facts = snapshot.facts
    name = prometheus_name(snapshot.name, facts.unit)
    sample = f"{name}_total" if facts.instrument == "counter" else name
    # OpenMetrics names the family, the older format names the sample.
    family = name if open_metrics else sample
    # Only OpenMetrics escapes quotes here. Prometheus rejects a page of the older format that does.
    help_text = _escaped(facts.meaning, quotes=open_metrics)
    yield f"# HELP {family} {help_text}"
    yield f"# TYPE {family} {facts.instrument}"
    if open_metrics and facts.unit in _UNITS:
        yield f"# UNIT {family} {_UNITS[facts.unit]}"
    names = tuple(_NO_NAME.sub("_", label) for label in snapshot.labels)
    for values, point in sorted(snapshot.points.items()):
        if isinstance(point, HistogramPoint):
            yield from _histogram_lines(name, names, values, point, facts.buckets, open_metrics)
        else:
            yield f"{sample}{_labels(names, values)} {_number(point)}"


def _histogram_lines(
    name: str,
    names: Labels,
    values: Labels,
    point: HistogramPoint,
    bounds: Sequence[float],
    open_metrics: bool,
) -> Iterator[str]:
    count = 0
    uppers = (*(_number(float(bound)) for bound in bounds), "+Inf")
    for upper, inside, exemplar in zip(uppers, point.counts, point.exemplars, strict=True):
        count += inside
        labels = _labels((*names, "le"), (*values, upper))
        yield f"{name}_bucket{labels} {count}" + (_exemplar(exemplar) if open_metrics else "")
    yield f"{name}_sum{_labels(names, values)} {_number(point.total)}"
    yield f"{name}_count{_labels(names, values)} {count}"


def _exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    value, trace_id, unix_s = exemplar
    return f' # {{trace_id="{trace_id}"}} {_number(value)} {unix_s:.3f}'


def _labels(names: Labels, values: Labels) -> str:
    texts = [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return f"{{{','.join(texts)}}}" if texts else ""


def _number(value: float) -> str:
    return repr(value)


def _escaped(value: str, *, quotes: bool = True) -> str:
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped
