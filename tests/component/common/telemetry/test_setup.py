"""Spans continue over gRPC metadata and reach OTLP receivers."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace_common.config import ServiceConfig
from headrace_common.telemetry.exporter import SHUTDOWN_TIMEOUT_S
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from tests.collector import SpanReceiver, receiving_spans
from tests.waiting import until

STOPPED_IN_S = SHUTDOWN_TIMEOUT_S + 3.0
"""The end of a service does not wait for collectors. The rest is for a slow machine."""


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[SpanReceiver, str]]:
    async with receiving_spans() as (receiving, url):
        yield receiving, url.removeprefix("http://")


def names(receiving: SpanReceiver) -> set[str]:
    """The names of the spans received."""
    return {span.name for spans in receiving.traces.values() for span in spans}


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


async def stop(telemetry: Telemetry) -> float:
    start = time.monotonic()
    await asyncio.to_thread(telemetry.shutdown)
    return time.monotonic() - start


async def test_collectors_can_be_replaced(
    receiver: tuple[SpanReceiver, str], caplog: pytest.LogCaptureFixture
) -> None:
    receiving, collector = receiver
    gone = free_endpoint()
    telemetry = init_telemetry("prefill", "prefill-0", ServiceConfig(traces_sampler="always_on"))
    telemetry.set_collectors([gone, collector])
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b", "c"):
            telemetry.start_span(name).end()
            await asyncio.to_thread(telemetry.force_flush)
    assert names(receiving) == {"a", "b", "c"}
    assert sum(gone in record.getMessage() for record in caplog.records) == 1
    telemetry.set_collectors([])
    telemetry.start_span("d").end()
    assert await stop(telemetry) < STOPPED_IN_S
    assert "d" not in names(receiving)


async def test_shutdown_is_bounded_when_collectors_do_not_respond() -> None:
    # These accept connections and send nothing, so calls end by their timeouts only.
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    endpoints = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in silent]
    telemetry = init_telemetry(
        "decode",
        "decode-0",
        ServiceConfig(otlp_endpoint=f"http://{endpoints[0]}", traces_sampler="always_on"),
    )
    telemetry.set_collectors(endpoints)
    for _ in range(3_000):
        telemetry.start_span("lost").end()
    try:
        assert await stop(telemetry) < STOPPED_IN_S
    finally:
        for listener in silent:
            listener.close()


async def test_an_otlp_endpoint_gets_every_span(receiver: tuple[SpanReceiver, str]) -> None:
    receiving, collector = receiver
    config = ServiceConfig(otlp_endpoint=f"http://{collector}", traces_sampler="always_on")
    telemetry = init_telemetry("router", "router-0", config)
    kept = InMemorySpanExporter()
    telemetry.add_exporter(kept)
    telemetry.start_span("both").end()
    await until(lambda: "both" in names(receiving) and len(kept.get_finished_spans()) == 1)
    assert await stop(telemetry) < STOPPED_IN_S
