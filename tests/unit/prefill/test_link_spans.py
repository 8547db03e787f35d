"""The spans of a task's transfer links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from headrace.prefill.v1 import prefill_pb2
from headrace_common.config import ServiceConfig
from headrace_common.errors import HeadraceError, TransferFailed
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import NEVER
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import SendReport
from headrace_prefill.spans import EndedTask, LinkBandwidths, TaskSpans
from tests.ended_spans import ended_spans
from tests.transfer_links import US, packed, sent_link

REF = WorkerRef("prefill-1", "00")
BIG = 1 << 20


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = init_telemetry("prefill", "prefill-1", ServiceConfig(traces_sampler="always_on"))
    yield telemetry
    telemetry.shutdown()


def record(
    telemetry: Telemetry, *reports: SendReport, error: HeadraceError | None = None
) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """The attributes of the task's span, and the spans of the links."""
    spans = ended_spans(telemetry)
    task = prefill_pb2.PrefillTask(decode_worker_id="decode-0")
    TaskSpans(telemetry, REF).record(EndedTask(task, None, reports, error, 1, 2))
    *links, root = spans
    return root.attributes or {}, links


def report(rank: int, *links: Any) -> SendReport:
    return SendReport("x1", rank, "", "", links, 10, "10.0.0.1", "device")


def test_a_failed_task_names_the_link_that_it_interrupted(telemetry: Telemetry) -> None:
    stuck = packed((4, 0, 3, 100, 0, 0, 0, 500, 0, 0, NEVER, 10))
    attributes, spans = record(
        telemetry,
        report(0, sent_link(layers=stuck, payload_bytes=0, moving_ns=0)),
        report(1, sent_link()),
        error=TransferFailed("the peer is gone"),
    )
    assert [span.status.description for span in spans] == ["the peer is gone", None]
    assert attributes[schema.ATTRIBUTE_LAST_LINK] == "prefill-1/r0 -> decode-0/r0"
    assert attributes[schema.ATTRIBUTE_LAST_CAUSE] == "unfinished"
    assert attributes[schema.ATTRIBUTE_LAST_LAYER] == 4
    assert schema.ATTRIBUTE_GIGABYTES_PER_S not in spans[0].attributes


def test_a_link_is_compared_with_the_best_bandwidth(telemetry: Telemetry) -> None:
    # 1 MiB in 1 ms is 8.39 Gbit/s, and the best link was ten times as fast.
    best = sent_link(payload_bytes=BIG, moving_ns=100 * US)
    link = sent_link(payload_bytes=BIG, moving_ns=1_000 * US)
    _, (_, span) = record(telemetry, report(0, best, link))
    assert span.attributes[schema.ATTRIBUTE_BANDWIDTH_SHARE] == pytest.approx(0.1)
    expected_ms = 0.1 / 0.9
    assert span.attributes[schema.ATTRIBUTE_EXPECTED_MS] == pytest.approx(expected_ms)


def test_the_rates_of_many_hosts_are_bounded() -> None:
    bandwidths = LinkBandwidths()
    for number in range(2_000):
        bandwidths.compare(sent_link(payload_bytes=BIG, destination_host=f"h{number}"), 1.0)
    assert bandwidths.compare(sent_link(destination_host="h0"), 1.0) is None
    assert bandwidths.compare(sent_link(destination_host="h1999"), 1.0) == 8.0


def test_a_task_without_links_has_no_last_one(telemetry: Telemetry) -> None:
    attributes, links = record(telemetry, report(0))
    assert schema.ATTRIBUTE_LAST_LINK not in attributes
    assert links == []
