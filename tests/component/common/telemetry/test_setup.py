"""Spans continue over gRPC metadata and reach OTLP receivers."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import use_span

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.client_config import ClientFacingConfig
from headrace_common.config import ServiceConfig
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import ClientServices, GrpcServer
from headrace_common.rpc.trace_context import (
    metadata_with_trace,
)
from headrace_common.telemetry.exporter import SHUTDOWN_TIMEOUT_S
from headrace_common.telemetry.schema import (
    SPAN_DECODE,
)
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from tests.waiting import until

STOPPED_IN_S = SHUTDOWN_TIMEOUT_S + 3.0
"""The end of a service does not wait for collectors. The rest is for a slow machine."""


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores the exported spans."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> dict[str, trace_pb2.Span]:
        """The spans received, by name."""
        return {
            span.name: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


class Traced(inference_pb2_grpc.InferenceServiceServicer):
    """Makes a decode span in each call."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        with use_span(self._telemetry.start_span(SPAN_DECODE), end_on_exit=True):
            yield inference_pb2.GenerateResponse(text="a")
            await asyncio.sleep(0)
            yield inference_pb2.GenerateResponse(text="b")

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: object
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse()


def traced_server(telemetry: Telemetry) -> GrpcServer:
    server = GrpcServer(ClientFacingConfig(), (), ClientServices(()))
    traced = Traced(telemetry)  # type: ignore[abstract]
    assert server.client_server is not None
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(traced, server.client_server)
    return server


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[Receiver, str]]:
    receiving = Receiver()
    server = GrpcServer(ServiceConfig(insecure=True), [])
    add_receiver: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_receiver(receiving, server.server)
    yield receiving, await server.start()
    await server.server.stop(None)


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


async def stop(telemetry: Telemetry) -> float:
    start = time.monotonic()
    await asyncio.to_thread(telemetry.shutdown)
    return time.monotonic() - start


async def test_a_call_without_trace_context_has_a_root_span(receiver: tuple[Receiver, str]) -> None:
    receiving, collector = receiver
    telemetry = init_telemetry("decode", "decode-0", ServiceConfig(traces_sampler="always_on"))
    telemetry.set_collectors([collector])
    server = traced_server(telemetry)
    assert metadata_with_trace() == ()
    await server.start()
    async with open_channel(server.client_endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async for _ in stub.Generate(inference_pb2.GenerateRequest()):
            pass
    await stop(telemetry)
    await server.stop(None)
    assert receiving.spans[SPAN_DECODE].parent_span_id == b""


async def test_collectors_can_be_replaced(
    receiver: tuple[Receiver, str], caplog: pytest.LogCaptureFixture
) -> None:
    receiving, collector = receiver
    gone = free_endpoint()
    telemetry = init_telemetry("prefill", "prefill-0", ServiceConfig(traces_sampler="always_on"))
    telemetry.set_collectors([gone, collector])
    assert telemetry.collectors == tuple(sorted([gone, collector]))
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b", "c"):
            telemetry.start_span(name).end()
            await asyncio.to_thread(telemetry.force_flush)
    assert set(receiving.spans) == {"a", "b", "c"}
    assert sum(gone in record.getMessage() for record in caplog.records) == 1
    telemetry.set_collectors([])
    telemetry.start_span("d").end()
    assert await stop(telemetry) < STOPPED_IN_S
    assert "d" not in receiving.spans


@pytest.mark.parametrize("count", [1, 2])
async def test_shutdown_is_bounded_when_collectors_do_not_respond(count: int) -> None:
    # These accept connections and send nothing, so calls end by their timeouts only.
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
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


async def test_an_otlp_endpoint_gets_every_span(receiver: tuple[Receiver, str]) -> None:
    receiving, collector = receiver
    config = ServiceConfig(otlp_endpoint=f"http://{collector}", traces_sampler="always_on")
    telemetry = init_telemetry("router", "router-0", config)
    kept = InMemorySpanExporter()
    telemetry.add_exporter(kept)
    telemetry.start_span("both").end()
    await until(lambda: "both" in receiving.spans and len(kept.get_finished_spans()) == 1)
    assert await stop(telemetry) < STOPPED_IN_S


def test_importing_starts_no_thread_and_needs_no_arrays() -> None:
    program = (
        "import sys, threading, headrace_common.rpc.server, headrace_common.process.run, headrace_common.logs;"
        "assert threading.active_count() == 1, threading.enumerate();"
        "assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
