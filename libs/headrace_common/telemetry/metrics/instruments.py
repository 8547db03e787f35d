"""Counters, gauges and histograms of one process.

OpenTelemetry's own take 25 to 70 microseconds for each value, these take about one. Every instrument has at most
SERIES_MAX series, whatever labels it gets. Threads may share all of them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from threading import Lock
from typing import Final, NamedTuple, TypeAlias, TypeVar

from headrace_common.telemetry.schema_tables import METRICS, MetricFacts

SERIES_MAX: Final = 512
"""Series of one instrument. Further labels count in one series of the label OTHER."""
OTHER: Final = "other"

Labels: TypeAlias = tuple[str, ...]
Example: TypeAlias = tuple[str, float]
"""The trace of a request, as 32 hex characters, and when it ended, in seconds since 1970."""


class Exemplar(NamedTuple):
    """One value of a bucket, and the trace that it belongs to."""

    value: float
    trace_id: str
    unix_s: float


class HistogramPoint(NamedTuple):
    """Counts of each bucket, the last of which has no upper bound. `exemplars` has the newest of each bucket."""

    counts: tuple[int, ...]
    total: float
    exemplars: tuple[Exemplar | None, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of one instrument, by the values of its labels."""

    name: str
    facts: MetricFacts
    labels: Labels
    points: Mapping[Labels, float | HistogramPoint]


class Counter:
    """A sum that only grows."""

    def __init__(self, name: str, labels: Labels) -> None:
        self.name, self.labels = name, labels
        self._lock = Lock()
        self._values: dict[Labels, float] = {} if labels else {(): 0}

    def add(self, count: float, *values: str) -> None:
        """`values` are those of the labels, in their order."""
        with self._lock:
            if values not in self._values:
                values = _bounded(values, len(self._values), len(self.labels))
            self._values[values] = self._values.get(values, 0) + count

    def count(self, *values: str) -> None:
        """Adds one."""
        self.add(1, *values)

    def points(self) -> dict[Labels, float]:
        with self._lock:
            return dict(self._values)


class Gauge:
    """Values that are set. A label's value that is not set again keeps its last value, until `replace`."""

    def __init__(self, name: str, labels: Labels) -> None:
        self.name, self.labels = name, labels
        self._lock = Lock()
        self._values: dict[Labels, float] = {}

    def set(self, value: float, *values: str) -> None:
        """Ignored for a new series beyond SERIES_MAX."""
        with self._lock:
            if values in self._values or len(self._values) < SERIES_MAX:
                self._values[_checked(values, len(self.labels))] = value

    def replace(self, values: Mapping[str, float]) -> None:
        """Sets all series of a gauge with one label. Of more than SERIES_MAX, those farthest from 0 remain."""
        kept = values
        if len(values) > SERIES_MAX:
            names = sorted(values, key=lambda name: abs(values[name]), reverse=True)
            kept = {name: values[name] for name in names[:SERIES_MAX]}
        with self._lock:
            self._values = {_checked((name,), len(self.labels)): kept[name] for name in kept}

    def clear(self) -> None:
        """Removes all series."""
        with self._lock:
            self._values = {}

    def remove(self, first: str) -> None:
        """Removes the series with this value of the first label."""
        with self._lock:
            self._values = {key: one for key, one in self._values.items() if key[0] != first}

    def points(self) -> dict[Labels, float]:
        with self._lock:
            return dict(self._values)


class BucketCounts:
    """Counts of values by size, for one owner. Cheaper than a series, into which they are merged once."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def record(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class HistogramSeries:
    """The buckets of one combination of labels."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_lock", "_total")

    def __init__(self, bounds: Sequence[float], lock: Lock) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: list[tuple[float, str, float] | None] = [None] * (len(bounds) + 1)
        self._total, self._lock = 0.0, lock

    def add(self, value: float, example: Example | None = None) -> None:
        """Counts a value, perhaps as the new example of its bucket. The caller has the lock."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._total += value
        if example is not None:
            self._exemplars[bucket] = (value, *example)

    def merge(self, counts: BucketCounts) -> None:
        """Counts all values of `counts`, which has the same bounds. The caller has the lock."""
        self._counts = list(map(add, self._counts, counts.counts))
        self._total += counts.total

    def point(self) -> HistogramPoint:
        with self._lock:
            exemplars = tuple(one and Exemplar._make(one) for one in self._exemplars)
            return HistogramPoint(tuple(self._counts), self._total, exemplars)


class Histogram:
    """Counts of values by size. All histograms of a store share a lock."""

    def __init__(self, name: str, labels: Labels, bounds: Sequence[float], lock: Lock) -> None:
        self.name, self.labels = name, labels
        self._bounds, self._lock = bounds, lock
        self._series: dict[Labels, HistogramSeries] = {}

    def series(self, *values: str) -> HistogramSeries:
        """The series of these labels. A caller may keep it."""
        found = self._series.get(values)
        if found is not None:
            return found
        with self._lock:
            values = _bounded(values, len(self._series), len(self.labels))
            return self._series.setdefault(values, HistogramSeries(self._bounds, self._lock))

    def local_counts(self) -> BucketCounts:
        """Empty counts with this histogram's bounds, for `merge` of a series."""
        return BucketCounts(self._bounds)

    def record(self, value: float, *values: str, example: Example | None = None) -> None:
        """Counts a value of the series with these labels."""
        series = self._series.get(values) or self.series(*values)
        with self._lock:
            series.add(value, example)

    def points(self) -> dict[Labels, HistogramPoint]:
        with self._lock:
            series = dict(self._series)
        return {values: one.point() for values, one in series.items()}


_Instrument = TypeVar("_Instrument", Counter, Gauge, Histogram)


class MetricStore:
    """All instruments of a process. The schema has each instrument's kind, unit and labels."""

    def __init__(self) -> None:
        self.start_unix_ns = time.time_ns()
        self.lock = Lock()
        """That of all series of histograms, for a caller that adds to several."""
        self._instruments: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str, *labels: str) -> Counter:
        """`name` and `labels` are constants of the schema. Raises ValueError where the schema differs.

        `labels`: in the order of their values, without them as the schema has them.
        """
        facts = _facts(name, "counter", labels)
        return self.include(Counter(name, labels or facts.labels))

    def gauge(self, name: str, *labels: str) -> Gauge:
        """As `counter`."""
        facts = _facts(name, "gauge", labels)
        return self.include(Gauge(name, labels or facts.labels))

    def histogram(self, name: str, *labels: str) -> Histogram:
        """As `counter`."""
        facts = _facts(name, "histogram", labels)
        return self.include(Histogram(name, labels or facts.labels, facts.buckets, self.lock))

    def collect(self) -> list[Snapshot]:
        """The values of all instruments that have some."""
        return [
            Snapshot(name, METRICS[name], one.labels, points)
            for name, one in tuple(self._instruments.items())
            if (points := one.points())
        ]

    def include(self, instrument: _Instrument) -> _Instrument:
        """Collects the values of an instrument too. Raises ValueError when there is one with its name."""
        if instrument.name in self._instruments:
            raise ValueError(f"the process has a metric {instrument.name} already")
        self._instruments[instrument.name] = instrument
        return instrument


def _facts(name: str, kind: str, labels: Labels) -> MetricFacts:
    facts = METRICS[name]
    if facts.instrument != kind:
        raise ValueError(f"the schema has {name} as a {facts.instrument}, not as a {kind}")
    if labels and set(facts.labels) != set(labels):
        raise ValueError(
            f"the schema has {name} with the attributes {sorted(facts.labels)}, not {sorted(labels)}"
        )
    return facts


def _bounded(values: Labels, series: int, count: int) -> Labels:
    """The labels of a new series. `series` is how many there are."""
    # The last one is for OTHER.
    return _checked(values, count) if series < SERIES_MAX - 1 else (OTHER,) * count


def _checked(values: Labels, count: int) -> Labels:
    if len(values) != count:
        raise ValueError(f"a series needs {count} values of labels, not {len(values)}")
    return values
