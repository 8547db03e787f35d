"""Metrics as Prometheus's text."""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource

from headrace_common.telemetry.metrics import Metrics


def test_each_kind_of_metric_has_its_lines() -> None:
    metrics = Metrics(Resource.create(), "", readable=True)
    counter = metrics.meter.create_counter("headrace.requests")
    counter.add(2, {"end.reason": 'a "b"\n'})
    metrics.meter.create_gauge("headrace.depth").set(1.5, {"queue": "prefill"})
    histogram = metrics.meter.create_histogram(
        "headrace.wait_ms", explicit_bucket_boundaries_advisory=[1, 10]
    )
    for value in (0.5, 5, 50):
        histogram.record(value)
    text = metrics.text()
    counter.add(1, {"end.reason": 'a "b"\n'})
    later = metrics.text()
    metrics.shutdown()
    assert text == (
        "# TYPE headrace_requests_total counter\n"
        'headrace_requests_total{end_reason="a \\"b\\"\\n"} 2\n'
        "# TYPE headrace_depth gauge\n"
        'headrace_depth{queue="prefill"} 1.5\n'
        "# TYPE headrace_wait_ms histogram\n"
        'headrace_wait_ms_bucket{le="1"} 1\n'
        'headrace_wait_ms_bucket{le="10"} 2\n'
        'headrace_wait_ms_bucket{le="+Inf"} 3\n'
        "headrace_wait_ms_sum 55.5\n"
        "headrace_wait_ms_count 3\n"
    )
    # Reading changes nothing: a counter goes on.
    assert 'headrace_requests_total{end_reason="a \\"b\\"\\n"} 3\n' in later
    assert "headrace_wait_ms_count 3\n" in later


def test_metrics_that_nothing_reads_are_not_recorded() -> None:
    metrics = Metrics(Resource.create(), "")
    metrics.meter.create_counter("headrace.requests").add(1)
    assert metrics.text() == ""
