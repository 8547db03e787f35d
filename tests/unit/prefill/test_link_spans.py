"""The spans of a task's transfer links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from headrace_common.config import ServiceConfig
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import NEVER
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_kv.handoff.messages import SendReport
from headrace_kv.layout.layout import WorkerRef
from headrace_prefill.bandwidths import MEASURED, SETTING, LinkBandwidths
from headrace_prefill.link_spans import LinkSpans
from tests.ended_spans import ended_spans
from tests.transfer_links import START_UNIX_NS, US, link_sent, packed

REF = WorkerRef("prefill-1", "00")
BIG = 1 << 20


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = init_telemetry("prefill", "prefill-1", ServiceConfig(traces_sampler="always_on"))
    yield telemetry
    telemetry.shutdown()


def record(
    telemetry: Telemetry,
    *reports: SendReport,
    error: str = "",
    layers: bool = False,
    gbit_per_s: float = 0.0,
) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """The attributes for the task's span, and the spans of the links."""
    spans = ended_spans(telemetry)
    links = LinkSpans(telemetry, REF, LinkBandwidths(gbit_per_s), layers=layers)
    parent = telemetry.start_span(schema.SPAN_PREFILL)
    return links.record(parent, "decode-0", reports, error), spans


def report(rank: int, *links: Any) -> SendReport:
    return SendReport("x1", rank, "", "", links, 10, "10.0.0.1", "device")


def test_a_failed_task_names_the_link_that_it_interrupted(telemetry: Telemetry) -> None:
    stuck = packed((4, 0, 3, 100, 0, 0, 0, 500, 0, 0, NEVER, 10))
    attributes, spans = record(
        telemetry,
        report(0, link_sent(layers=stuck, payload_bytes=0, moving_ns=0)),
        report(1, link_sent()),
        error="the peer is gone",
    )
    assert [span.status.description for span in spans] == ["the peer is gone", None]
    assert attributes[schema.ATTRIBUTE_LAST_LINK] == "prefill-1/r0 -> decode-0/r0"
    assert attributes[schema.ATTRIBUTE_LAST_CAUSE] == "unfinished"
    assert attributes[schema.ATTRIBUTE_LAST_LAYER] == 4
    assert schema.ATTRIBUTE_GIGABYTES_PER_S not in spans[0].attributes


def test_layers_have_spans_where_asked_for(telemetry: Telemetry) -> None:
    _, spans = record(telemetry, report(0, link_sent()), layers=True)
    assert [span.name for span in spans] == [
        *[schema.SPAN_TRANSFER_LAYER] * 4,
        schema.SPAN_TRANSFER_LINK,
    ]
    layer = spans[1]
    assert layer.parent.span_id == spans[-1].context.span_id
    assert layer.attributes[schema.ATTRIBUTE_LAYER] == 1
    assert layer.attributes[schema.ATTRIBUTE_SEND_WAIT_MS] == 0.5
    assert layer.start_time == START_UNIX_NS + 1_500 * US
    assert layer.end_time == START_UNIX_NS + 3_000 * US


def test_a_link_is_compared_with_the_configured_bandwidth(telemetry: Telemetry) -> None:
    # 1 MiB in 1 ms is 8.39 Gbit/s.
    link = link_sent(payload_bytes=BIG, moving_ns=1_000 * US)
    _, (span,) = record(telemetry, report(0, link), gbit_per_s=100)
    assert span.attributes[schema.ATTRIBUTE_BANDWIDTH_FROM] == SETTING
    assert span.attributes[schema.ATTRIBUTE_BANDWIDTH_SHARE] == pytest.approx(0.0839, abs=1e-4)
    expected_ms = BIG / (12.5e9 * 0.9) * 1e3
    assert span.attributes[schema.ATTRIBUTE_EXPECTED_MS] == pytest.approx(expected_ms)


def test_the_rates_of_many_hosts_are_bounded() -> None:
    bandwidths = LinkBandwidths()
    for number in range(2_000):
        bandwidths.compare(link_sent(payload_bytes=BIG, destination_host=f"h{number}"), 1.0)
    assert bandwidths.compare(link_sent(destination_host="h0"), 1.0) is None
    assert bandwidths.compare(link_sent(destination_host="h1999"), 1.0) == (8.0, MEASURED)


def test_a_task_without_links_has_no_attributes(telemetry: Telemetry) -> None:
    assert record(telemetry, report(0)) == ({}, [])
