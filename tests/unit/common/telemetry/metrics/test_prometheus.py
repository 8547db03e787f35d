"""Metrics as Prometheus's text and as OpenMetrics."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import prometheus_client.openmetrics.parser
import prometheus_client.parser
import pytest

from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import MetricStore
from headrace_common.telemetry.metrics.prometheus import (
    OPEN_METRICS_TYPE,
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
    first.record(0.004, "m", example=(TRACE, 1.5))
    return store


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


def test_promtool_accepts_every_help_text() -> None:
    """prometheus_client's parser accepts escapes that Prometheus rejects."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    store = MetricStore()
    for name, facts in METRICS.items():
        if facts.instrument == "gauge":
            store.gauge(name, *facts.labels).set(3, *("x",) * len(facts.labels))
    store.counter(schema.METRIC_REQUESTS, schema.ATTRIBUTE_END_REASON).add(2, 'a "b"\n')
    text = prometheus_text(store.collect())
    assert '"prefill"' in text
    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "error while linting" not in checked.stderr, checked.stderr
