"""Counters, gauges and histograms: values and bounds."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import (
    OTHER,
    SERIES_MAX,
    HistogramPoint,
    MetricStore,
)
from headrace_common.telemetry.metrics.prometheus import prometheus_text

WORKERS = 1_000


def points(store: MetricStore, name: str) -> Mapping[tuple[str, ...], float | HistogramPoint]:
    (found,) = (one.points for one in store.collect() if one.name == name)
    return found


def test_series_are_bounded_with_a_thousand_workers() -> None:
    store = MetricStore()
    worker = schema.ATTRIBUTE_WORKER_ID
    counter = store.counter(schema.METRIC_TRANSFER_BYTES, worker)
    gauge = store.gauge(schema.METRIC_BLOCKS_TOTAL, worker)
    offsets = store.gauge(schema.METRIC_CLOCK_OFFSET, worker)
    times = store.histogram(
        schema.METRIC_TIME_TO_FIRST_TOKEN, schema.ATTRIBUTE_GEN_AI_REQUEST_MODEL
    )
    for number in range(WORKERS):
        counter.add(2, f"w{number}")
        gauge.set(1, f"w{number}")
        times.record(1, f"w{number}")
    offsets.replace({f"w{number}": number - 300.0 for number in range(WORKERS)})
    for snapshot in store.collect():
        assert len(snapshot.points) == SERIES_MAX, snapshot.name
    # Nothing is lost, and the series of workers that were known go on.
    transferred = points(store, schema.METRIC_TRANSFER_BYTES)
    assert sum(map(float, transferred.values())) == 2 * WORKERS  # type: ignore[arg-type]
    counter.add(5, "w3")
    assert points(store, schema.METRIC_TRANSFER_BYTES)[("w3",)] == 7
    rest = points(store, schema.METRIC_TIME_TO_FIRST_TOKEN)[(OTHER,)]
    assert isinstance(rest, HistogramPoint)
    assert sum(rest.counts) == WORKERS - (SERIES_MAX - 1)
    # Of clocks, those that are farthest away.
    assert ("w999",) in points(store, schema.METRIC_CLOCK_OFFSET)
    assert ("w300",) not in points(store, schema.METRIC_CLOCK_OFFSET)
    assert len(prometheus_text(store.collect())) < 2_000_000


def test_threads_lose_no_count() -> None:
    store = MetricStore()
    counter = store.counter(schema.METRIC_MIGRATIONS, schema.ATTRIBUTE_END_REASON)

    def count() -> None:
        for _ in range(2_000):
            counter.add(1, "x")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert points(store, schema.METRIC_MIGRATIONS)[("x",)] == 8_000


def test_an_instrument_is_as_the_schema_has_it() -> None:
    store = MetricStore()
    with pytest.raises(ValueError, match="as a counter, not as a gauge"):
        store.gauge(schema.METRIC_REQUESTS)
    with pytest.raises(ValueError, match="with the attributes"):
        store.counter(schema.METRIC_REQUESTS, schema.ATTRIBUTE_TIER)
    counter = store.counter(schema.METRIC_REQUESTS)
    with pytest.raises(ValueError, match="already"):
        store.counter(schema.METRIC_REQUESTS)
    with pytest.raises(ValueError, match="1 values of labels, not 2"):
        counter.add(1, "a", "b")
