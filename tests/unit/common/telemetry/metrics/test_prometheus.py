"""Metrics as Prometheus's text and as OpenMetrics."""

from __future__ import annotations

from typing import Any

import prometheus_client.openmetrics.parser
import prometheus_client.parser
import pytest

from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import MetricStore
from headrace_common.telemetry.metrics.prometheus import (
    OPEN_METRICS_TYPE,
    TEXT_TYPE,
    content_type,
    prometheus_name,
    prometheus_text,
)
from headrace_common.telemetry.schema_tables import METRICS

# The package has types for a part of it only.
read_text: Any = prometheus_client.parser.text_string_to_metric_families
read_open_metrics: Any = prometheus_client.openmetrics.parser.text_string_to_metric_families
TRACE = "0af7651916cd43dd8448eb211c80319c"


def filled() -> MetricStore:
    """A store with one instrument of each kind."""
    store = MetricStore()
    store.counter(schema.METRIC_REQUESTS, schema.ATTRIBUTE_END_REASON).add(2, 'a "b"\n')
    store.gauge(schema.METRIC_QUEUE_DEPTH, schema.ATTRIBUTE_QUEUE).set(1.5, "prefill")
    first = store.histogram(
        schema.METRIC_TIME_TO_FIRST_TOKEN, schema.ATTRIBUTE_GEN_AI_REQUEST_MODEL
    )
    for value in (0.0004, 0.003, 70.0):
        first.record(value, "m")
    first.record(0.004, "m", trace_id=TRACE)
    return store


def test_each_kind_of_metric_has_its_lines() -> None:
    lines = prometheus_text(filled().collect()).splitlines()
    assert "# TYPE headrace_requests_total counter" in lines
    assert 'headrace_requests_total{headrace_end_reason="a \\"b\\"\\n"} 2' in lines
    assert "# TYPE headrace_queue_depth_current gauge" in lines
    assert 'headrace_queue_depth_current{headrace_queue_name="prefill"} 1.5' in lines
    name = "gen_ai_server_time_to_first_token_seconds"
    assert f"# TYPE {name} histogram" in lines
    model = 'gen_ai_request_model="m"'
    assert f'{name}_bucket{{{model},le="0.001"}} 1' in lines
    assert f'{name}_bucket{{{model},le="0.0025"}} 1' in lines
    assert f'{name}_bucket{{{model},le="0.005"}} 3' in lines
    assert f'{name}_bucket{{{model},le="+Inf"}} 4' in lines
    assert f"{name}_count{{{model}}} 4" in lines
    assert not any(TRACE in line for line in lines)


def test_open_metrics_has_the_trace_of_a_value_in_its_bucket() -> None:
    text = prometheus_text(filled().collect(), OPEN_METRICS_TYPE)
    assert text.endswith("# EOF\n")
    families = {one.name: one for one in read_open_metrics(text)}
    first = families["gen_ai_server_time_to_first_token_seconds"]
    assert first.unit == "seconds"
    exemplars = [sample.exemplar for sample in first.samples if sample.exemplar]
    assert [one.labels for one in exemplars] == [{"trace_id": TRACE}]
    assert exemplars[0].value == 0.004
    assert families["headrace_requests"].type == "counter"


def test_prometheus_reads_every_metric_of_the_schema() -> None:
    store = MetricStore()
    for name, facts in METRICS.items():
        values = ("x",) * len(facts.labels)
        if facts.instrument == "counter":
            store.counter(name, *facts.labels).add(3, *values)
        elif facts.instrument == "gauge":
            store.gauge(name, *facts.labels).set(3, *values)
        else:
            store.histogram(name, *facts.labels).record(3, *values, trace_id=TRACE)
    snapshots = store.collect()
    assert len(snapshots) == len(METRICS)
    text = list(read_text(prometheus_text(snapshots)))
    opened = list(read_open_metrics(prometheus_text(snapshots, OPEN_METRICS_TYPE)))
    assert len({one.name for one in text}) == len({one.name for one in opened}) == len(METRICS)
    assert {one.type for one in opened} == {"counter", "gauge", "histogram"}
    assert all(one.documentation for one in text)


@pytest.mark.parametrize(
    "accept, kind",
    [
        ("", TEXT_TYPE),
        ("text/plain", TEXT_TYPE),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2", OPEN_METRICS_TYPE),
    ],
)
def test_a_reader_gets_open_metrics_if_it_asks_for_it(accept: str, kind: str) -> None:
    assert content_type(accept) == kind


@pytest.mark.parametrize(
    "name, unit, expected",
    [
        ("headrace.queue.expected_wait", "s", "headrace_queue_expected_wait_seconds"),
        ("headrace.transfer.bytes", "By", "headrace_transfer_bytes"),
        ("headrace.requests", "{request}", "headrace_requests"),
    ],
)
def test_names_end_with_the_unit_once(name: str, unit: str, expected: str) -> None:
    assert prometheus_name(name, unit) == expected
