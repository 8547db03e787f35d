"""What a collector hears of a router: the queues, and how requests end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)

from headrace.worker.v1 import worker_pb2
from headrace_common import telemetry_schema as schema
from headrace_common.errors import InvalidRequest
from tests.component.router.fakes import Rig, eventually, hand_over, say

Sample = tuple[str, tuple[tuple[str, str], ...]]


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the newest value of every metric, by name and attributes; of histograms, the count."""

    def __init__(self) -> None:
        self.values: dict[Sample, float] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in getattr(metric, metric.WhichOneof("data")).data_points:
                        attributes = tuple((a.key, a.value.string_value) for a in point.attributes)
                        counted = metric.WhichOneof("data") == "histogram"
                        value = point.count if counted else point.as_int or point.as_double
                        self.values[metric.name, attributes] = value
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def value(self, name: str, **attributes: str) -> float | None:
        return self.values.get((name, tuple(attributes.items())))


@pytest.fixture
async def collected() -> AsyncIterator[tuple[Rig, Collector]]:
    collector = Collector()
    server = grpc.aio.server()
    add: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    rig = await Rig(otlp_endpoint=f"http://127.0.0.1:{port}").start()
    yield rig, collector
    await rig.close()
    await server.stop(0)


async def _export(rig: Rig) -> None:
    rig.router.metrics.look()
    await asyncio.to_thread(rig.telemetry.metrics.force_flush)


async def test_a_collector_hears_how_requests_end(collected: tuple[Rig, Collector]) -> None:
    rig, collector = collected
    await rig.add_decode(say("ok"))
    for _ in range(3):
        await rig.ask()
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.ask(model="another")
    await _export(rig)
    ended = {schema.ATTRIBUTE_END_REASON: "length"}
    assert collector.value(schema.METRIC_REQUESTS, **ended) == 3
    refused = {schema.ATTRIBUTE_END_REASON: InvalidRequest.reason}
    assert collector.value(schema.METRIC_REQUESTS, **refused) == 1
    assert collector.value(schema.METRIC_TIME_TO_FIRST_TOKEN_MS) == 3


async def test_a_collector_hears_of_workers_whose_caches_cannot_count(
    collected: tuple[Rig, Collector],
) -> None:
    rig, collector = collected
    await rig.add_decode(say("ok"))
    await _export(rig)
    assert collector.value(schema.METRIC_PREFIX_FAULTS) == 0
    foreign = worker_pb2.KvHashing(key_fingerprint=1, block_tokens=16)
    await rig.add_decode(say("ok"), foreign)
    await eventually(lambda: len(rig.router.prefixes.faults) == 1)
    await _export(rig)
    assert collector.value(schema.METRIC_PREFIX_FAULTS) == 1


async def test_a_collector_hears_how_long_the_queue_is_and_how_old(
    collected: tuple[Rig, Collector],
) -> None:
    rig, collector = collected
    await rig.add_decode(say("ok"))
    worker = await rig.add_prefill(hand_over, credit=0)
    waiting = asyncio.create_task(rig.ask())
    await eventually(lambda: rig.router.queue.depth == 1)
    await asyncio.sleep(0.05)
    await _export(rig)
    prefill = {schema.ATTRIBUTE_QUEUE: "prefill"}
    assert collector.value(schema.METRIC_QUEUE_DEPTH, **prefill) == 1
    assert collector.value(schema.METRIC_QUEUE_DEPTH, **{schema.ATTRIBUTE_QUEUE: "requests"}) == 1
    age_ms = collector.value(schema.METRIC_QUEUE_AGE_MS)
    assert age_ms is not None
    assert 50 <= age_ms < 10_000
    await worker.give_credit(1)
    await waiting
    await _export(rig)
    assert collector.value(schema.METRIC_QUEUE_DEPTH, **prefill) == 0
