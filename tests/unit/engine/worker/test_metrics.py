"""The metrics of a worker's transfers."""

from __future__ import annotations

from headrace_common.config import ServiceConfig
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import HistogramPoint
from headrace_common.telemetry.setup import init_telemetry
from headrace_engine.worker.metrics import WorkerMetrics
from headrace_kv.handoff.messages import SendReport
from tests.transfer_links import link_sent


def test_links_count_by_kind_and_transport() -> None:
    telemetry = init_telemetry("prefill", "prefill-0", ServiceConfig())
    try:
        metrics = WorkerMetrics(telemetry.metrics)
        near = SendReport("x1", 0, "", "", (link_sent(),), 10, "10.0.0.2")
        far = SendReport("x1", 1, "", "", (link_sent(), link_sent(payload_bytes=0)), 10, "10.0.0.1")
        metrics.transfer_ended("prefill-0", "", 800, [near, far])
        metrics.transfer_ended("prefill-0", "CANCELLED", 0, [far])
        points = {one.name: one.points for one in telemetry.metrics.store.collect()}
    finally:
        telemetry.shutdown()
    assert points[schema.METRIC_LINK_BYTES] == {
        ("same_host", "mooncake/tcp"): 400,
        ("network", "mooncake/tcp"): 800,
    }
    rates = points[schema.METRIC_LINK_RATE]
    # A link without bytes has no rate.
    counts = {
        labels: sum(point.counts)
        for labels, point in rates.items()
        if isinstance(point, HistogramPoint)
    }
    assert counts == {
        ("same_host", "mooncake/tcp"): 1,
        ("network", "mooncake/tcp"): 2,
    }
