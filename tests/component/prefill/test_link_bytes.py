"""The bytes in the spans of a transfer's links are those that decode's ledger has counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from headrace_common.config import ServiceConfig
from headrace_common.errors import TransferFailed
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import unpack_writes
from headrace_common.telemetry.setup import init_telemetry
from headrace_kv.handoff.messages import SendReport
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.plan.shard_map import expected_keys
from headrace_kv.transport.base import KvTransport, Strategy
from headrace_kv.transport.in_memory import Fault, FaultKind, FaultPlan, InMemoryTransport
from headrace_kv.transport.staging import strategy as staging_strategy
from headrace_kv.transport.staging.strategy import Thresholds
from headrace_kv.transport.staging.transport import StagedTransport
from headrace_prefill.bandwidths import LinkBandwidths
from headrace_prefill.link_spans import LinkSpans
from tests.component.engine.sim.support import close, decode_work, pair
from tests.ended_spans import ended_spans
from tests.waiting import until

REF = WorkerRef("prefill-0", "00")
PROMPT = list(range(100, 161))
STRATEGIES: tuple[Strategy, ...] = ("direct", "gather", "scatter", "gather_scatter")


def record(
    reports: Collection[SendReport], error: str = ""
) -> tuple[dict[str, object], Sequence[Any]]:
    """The attributes of the task's span, and the spans of its links."""
    telemetry = init_telemetry("prefill", REF.worker_id, ServiceConfig(traces_sampler="always_on"))
    spans = ended_spans(telemetry)
    links = LinkSpans(telemetry, REF, LinkBandwidths(), layers=False)
    parent = telemetry.start_span(schema.SPAN_PREFILL)
    attributes = links.record(parent, "decode-0", list(reports), error)
    telemetry.shutdown()
    return dict(attributes), spans


def force(monkeypatch: pytest.MonkeyPatch, strategy: Strategy) -> None:
    """Every write takes the strategy, whatever its runs are."""

    def chosen(thresholds: object, runs: object, allowed: Collection[Strategy]) -> Strategy:
        return strategy if strategy in allowed else "direct"

    monkeypatch.setattr(staging_strategy, "choose_strategy", chosen)


def staged() -> KvTransport:
    return StagedTransport(InMemoryTransport(), "127.0.0.1", Thresholds(long_bytes=1 << 40))


@pytest.mark.parametrize("prefill_tp,decode_tp", [(1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_links_have_the_bytes_of_the_ledger(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy, prefill_tp: int, decode_tp: int
) -> None:
    force(monkeypatch, strategy)
    async with pair(
        model="sim:layers=3,heads=6,context=256",
        max_num_batched_tokens=16,
        prefill={"tensor_parallel_size": prefill_tp},
        decode={"tensor_parallel_size": decode_tp},
        prefill_transports=staged,
        decode_transports=staged,
    ) as both:
        started = await both.start(decode_work(PROMPT, remote_kv=True))
        outcome, summary = await asyncio.gather(started.prefill, started.transfer.wait())
        ledger = started.transfer.ledger
        layouts = (both.prefill.descriptor.layout, both.decode.descriptor.layout)
        both.decode.arrived("x1")
        await close(started.reader)
    assert ledger is not None
    attributes, spans = record(outcome.reports)
    by_source: Counter[int] = Counter()
    keys = set()
    for span in spans:
        link = span.attributes
        source = int(str(link[schema.ATTRIBUTE_SOURCE_RANK]))
        payload_bytes = int(str(link[schema.ATTRIBUTE_PAYLOAD_BYTES]))
        writes = unpack_writes(str(link[schema.ATTRIBUTE_LINK_LAYERS]))
        assert sum(write.payload_bytes for write in writes) == payload_bytes
        assert link[schema.ATTRIBUTE_STRATEGY] == strategy
        by_source[source] += payload_bytes
        destination = link[schema.ATTRIBUTE_DESTINATION_RANK]
        keys |= {(source, destination, write.layer) for write in writes}
        for write in writes:
            assert write.finished
            assert write.ready_ns <= write.submitted_ns <= write.gathered_ns
            assert write.gathered_ns <= write.landed_ns <= write.acknowledged_ns
        gathered = any(write.gathered_ns > write.submitted_ns for write in writes)
        # A gather of few bytes may take less than a microsecond.
        assert not gathered or strategy != "direct"
    assert keys == expected_keys(*layouts, "x1")
    assert by_source == {rank: ledger.bytes_from(rank) for rank in ledger.source_ranks}
    assert sum(by_source.values()) == summary.payload_bytes
    whole, exposed = (
        float(str(attributes[name]))
        for name in (schema.ATTRIBUTE_TRANSFER_MS, schema.ATTRIBUTE_EXPOSED_MS)
    )
    assert 0.0 <= exposed <= whole


async def test_a_failed_transfer_keeps_its_links() -> None:
    async with pair(
        model="sim:layers=4,heads=2,context=256",
        prefill_transports=lambda: InMemoryTransport(FaultPlan({3: Fault(FaultKind.FAIL)})),
    ) as both:
        with pytest.raises(TransferFailed):
            await both.generate(PROMPT)
        # Decode may fail first.
        await until(lambda: bool(both.reports))
        reports = list(both.reports)
    attributes, (span,) = record(reports, "the write failed")
    writes = unpack_writes(str(span.attributes[schema.ATTRIBUTE_LINK_LAYERS]))
    assert [write.finished for write in writes][:3] == [True, True, False]
    assert span.status.description == "the write failed"
    assert span.attributes[schema.ATTRIBUTE_PAYLOAD_BYTES] == sum(
        write.payload_bytes for write in writes if write.finished
    )
    assert attributes[schema.ATTRIBUTE_LAST_CAUSE] == "unfinished"
    assert attributes[schema.ATTRIBUTE_LAST_LAYER] == 2
