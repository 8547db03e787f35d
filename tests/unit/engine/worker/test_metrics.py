"""The metrics of a worker's transfers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import pytest
from opentelemetry.sdk.resources import Resource

from headrace.worker.v1 import worker_pb2
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import HistogramPoint
from headrace_common.telemetry.metrics.process import Metrics
from headrace_common.time_model.model import HandoverTimes, StepTimes, TimeModel
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.worker.metrics import Reporting, WorkerMetrics
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import SendReport
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.receiver import Receiver
from headrace_kv.tiers.load_times import LoadTimes, TierLoad
from headrace_kv.tiers.promises import NO_PROMISES, PromiseCounts
from tests.transfer_links import sent_link

_reporting = partial(Reporting, status=worker_pb2.WatchStatusResponse, reserves_blocks=False)


class Shown:
    """The metrics of a worker, and their points after a sample."""

    def __init__(self) -> None:
        self._metrics = Metrics(Resource.create(), "")
        self.workers = WorkerMetrics(self._metrics)

    def __call__(self, name: str) -> Mapping[tuple[str, ...], object] | None:
        self.workers.sample()
        return {one.name: one.points for one in self._metrics.store.collect()}.get(name)


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_links_count_by_workers_kind_and_transport(shown: Shown) -> None:
    near = SendReport("x1", 0, "", "", (sent_link(),), 10, "10.0.0.2")
    far = SendReport("x1", 1, "", "", (sent_link(), sent_link(payload_bytes=0)), 10, "10.0.0.1")
    shown.workers.transfer_ended("prefill-0", "decode-0", "", 800, [near, far])
    shown.workers.transfer_ended("prefill-0", "decode-1", "CANCELLED", 0, [far], 700)
    assert shown(schema.METRIC_WASTED_TOKENS) == {("prefill-0", "CANCELLED"): 700}
    assert shown(schema.METRIC_TRANSFERS) == {
        ("prefill-0", "done"): 1,
        ("prefill-0", "CANCELLED"): 1,
    }
    assert shown(schema.METRIC_TRANSFER_BYTES) == {("prefill-0",): 800}
    near_pair = ("prefill-0", "decode-0", "same_host", "mooncake/tcp")
    far_pair = ("prefill-0", "decode-0", "network", "mooncake/tcp")
    other_pair = ("prefill-0", "decode-1", "network", "mooncake/tcp")
    pairs = near_pair, far_pair, other_pair
    assert shown(schema.METRIC_LINK_BYTES) == dict.fromkeys(pairs, 400)
    moving_s = 1e-9 * sent_link().moving_ns
    assert shown(schema.METRIC_LINK_TIME) == dict.fromkeys(pairs, pytest.approx(moving_s))
    rates = shown(schema.METRIC_LINK_RATE)
    assert rates is not None
    # A link without bytes has no rate.
    counts = {
        labels: sum(point.counts)
        for labels, point in rates.items()
        if isinstance(point, HistogramPoint)
    }
    assert counts == {("same_host", "mooncake/tcp"): 1, ("network", "mooncake/tcp"): 2}


def test_comparisons_count_by_workers_outcome_and_place(shown: Shown) -> None:
    for _ in range(2):
        shown.workers.blocks_compared("decode-0", "prefill-0", "same")
    shown.workers.blocks_compared("decode-0", "prefill-0", "quarantined", 3, 0)
    assert shown(schema.METRIC_CANARY_COMPARISONS) == {
        ("decode-0", "prefill-0", "same", "", ""): 2,
        ("decode-0", "prefill-0", "quarantined", "3", "0"): 1,
    }


class _Incoming:
    lease_count = 3

    def count_states(self) -> dict[str, int]:
        return {"open": 2, "draining": 1}


def test_the_state_of_a_decode_worker_is_shown_while_it_serves(shown: Shown) -> None:
    status = worker_pb2.WatchStatusResponse(
        running_requests=1,
        active_transfers=2,
        total_blocks=10,
        reserved_blocks=3,
        quarantined_blocks=1,
        used_blocks=5,
    )
    incoming = cast("Receiver", _Incoming())

    with shown.workers.reporting(
        "d0", Reporting(status=lambda: status, reserves_blocks=True, incoming=incoming)
    ):
        assert shown(schema.METRIC_TRANSFER_STATES) == {("d0", "open"): 2, ("d0", "draining"): 1}
        assert shown(schema.METRIC_WRITE_LEASES) == {("d0",): 3}
        assert shown(schema.METRIC_WORKER_REQUESTS) == {("d0", "running"): 1, ("d0", "waiting"): 0}
        assert shown(schema.METRIC_TRANSFERS_ACTIVE) == {("d0",): 2}
        assert shown(schema.METRIC_BLOCKS_USED) == {("d0",): 5}
        assert shown(schema.METRIC_BLOCKS_TOTAL) == {("d0",): 10}
        assert shown(schema.METRIC_BLOCKS_FREE) == {("d0",): 6}
        assert shown(schema.METRIC_BLOCKS_RESERVED) == {("d0",): 3}
        assert shown(schema.METRIC_BLOCKS_QUARANTINED) == {("d0",): 1}
        assert shown(schema.METRIC_WORKER_STALL) == {("d0",): 0}
        status.stall.age.FromSeconds(9)
        assert shown(schema.METRIC_WORKER_STALL) == {("d0",): 9}
    assert shown(schema.METRIC_TRANSFER_STATES) is None
    assert shown(schema.METRIC_BLOCKS_TOTAL) is None


def test_loads_from_lower_tiers_are_counted_once_for_all_ranks(shown: Shown) -> None:
    loads = LoadTimes()

    with shown.workers.reporting("prefill-0", _reporting(tier_loads=loads)):
        assert shown(schema.METRIC_TIER_LOADED_BLOCKS) is None
        for rank in range(2):
            loads.record(TierLoad(Tier.HOST, 3, 0.1), rank)
        assert shown(schema.METRIC_TIER_LOADED_BLOCKS) == {("prefill-0", "host"): 3}
        loads.record(TierLoad(Tier.DISK, 2, 0.1))
        loads.record(TierLoad(Tier.HOST, 1, 0.1))
        assert shown(schema.METRIC_TIER_LOADED_BLOCKS) == {
            ("prefill-0", "host"): 4,
            ("prefill-0", "disk"): 2,
        }
    # A counter stays after its worker.
    assert shown(schema.METRIC_TIER_LOADED_BLOCKS) == {
        ("prefill-0", "host"): 4,
        ("prefill-0", "disk"): 2,
    }


async def test_blocks_stored_below_kv_memory_are_counted_by_tier(shown: Shown) -> None:
    prefixes = PrefixEventPublisher(WorkerRef("prefill-0", "a" * 16), 8, tiers=tuple(Tier))

    with shown.workers.reporting("prefill-0", _reporting(stored_blocks=prefixes.stored_blocks)):
        prefixes.stored(None, [1, 2, 3])
        assert shown(schema.METRIC_TIER_STORED_BLOCKS) is None
        prefixes.stored(None, [1, 2], Tier.HOST)
        prefixes.stored(2, [3], Tier.HOST)
        prefixes.stored(None, [1], Tier.REMOTE)
        assert shown(schema.METRIC_TIER_STORED_BLOCKS) == {
            ("prefill-0", "host"): 3,
            ("prefill-0", "remote"): 1,
        }
        prefixes.stored(1, [2], Tier.REMOTE)
        assert shown(schema.METRIC_TIER_STORED_BLOCKS) == {
            ("prefill-0", "host"): 3,
            ("prefill-0", "remote"): 2,
        }


def test_promises_are_counted_and_broken_ones_once(shown: Shown) -> None:
    counts = NO_PROMISES

    def points() -> list[object]:
        names = schema.METRIC_PROMISES, schema.METRIC_PROMISED_BLOCKS, schema.METRIC_BROKEN_PROMISES
        return [shown(name) for name in names]

    with shown.workers.reporting(
        "decode-0", _reporting(reserves_blocks=True, promises=lambda: counts)
    ):
        # An engine without tiers.
        assert points() == [None, None, None]
        counts = PromiseCounts(2, {Tier.HOST: 9}, 1)
        for _ in range(2):
            assert points() == [
                {("decode-0",): 2},
                {("decode-0", "host"): 9},
                {("decode-0",): 1},
            ]
        counts = PromiseCounts(0, {Tier.HOST: 0}, 3)
        assert points() == [{("decode-0",): 0}, {("decode-0", "host"): 0}, {("decode-0",): 3}]
    assert points()[:2] == [None, None]


def test_the_errors_of_the_time_model_are_shown_once_it_has_learned(shown: Shown) -> None:
    model = TimeModel()

    with shown.workers.reporting("prefill-0", _reporting(times=lambda: model)):
        assert shown(schema.METRIC_TIME_ERROR) is None
        model = TimeModel(
            StepTimes(prompt_steps=9, error_p50=0.05, error_p90=0.1),
            HandoverTimes(count=2, error_p50=0.2, error_p90=0.4),
        )
        assert shown(schema.METRIC_TIME_ERROR) == {
            ("prefill-0", "step", "p50"): 0.05,
            ("prefill-0", "step", "p90"): 0.1,
            ("prefill-0", "handover", "p50"): 0.2,
            ("prefill-0", "handover", "p90"): 0.4,
        }
    assert shown(schema.METRIC_TIME_ERROR) is None
