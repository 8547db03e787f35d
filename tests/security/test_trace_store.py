"""A worker's credential exports spans without end. The router's memory is bounded, and streams of others go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

from headrace.inference.v1 import trace_pb2, trace_pb2_grpc
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.rpc.channel import open_channel
from tests.security.bystander import bystander
from tests.security.test_request_bounds import STALL_MAX_S, peak_bytes
from tests.suite.deployment import DEADLINE_S, prompt_of, suite

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_EXPORTS = 80
# Of all exports together.
_EXPORTED_BYTES = 130 * 1024 * 1024
_GROWTH_BYTES_MAX = 64 * 1024 * 1024


def exports(trace_id: str) -> Iterator[bytes]:
    """Few long spans of one trace, and many short ones."""
    shapes = ((45, 40_000), (15_000, 80))
    for number in range(_EXPORTS):
        count, length = shapes[number % 10 == 9]
        spans = [
            otlp_pb2.Span(
                trace_id=bytes.fromhex(trace_id), span_id=os.urandom(8), name="x" * length
            )
            for _ in range(count)
        ]
        scope = otlp_pb2.ScopeSpans(spans=spans)
        resource = otlp_pb2.ResourceSpans(scope_spans=[scope])
        request = trace_service_pb2.ExportTraceServiceRequest(resource_spans=[resource])
        yield request.SerializeToString()


async def test_spans_without_end_neither_fill_the_router_nor_stop_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        suite(tmp_path) as it,
        open_channel(it.child("router").endpoint, Credentials(role=Role.PREFILL)) as channel,
        bystander(it) as client,
    ):
        # The trace of another client, as a worker that serves its request knows it.
        trace_id = (await it.generate(prompt_of(40, 10_000), 2)).trace_id
        bodies = list(exports(trace_id))
        assert sum(map(len, bodies)) > _EXPORTED_BYTES
        router = it.child("router").process.pid
        export: Any = channel.unary_unary(_EXPORT)
        before_bytes, start_s = peak_bytes(router), time.monotonic()
        for body in bodies:
            await export(body, timeout=DEADLINE_S)
        end_s = time.monotonic()
        with capsys.disabled():
            client.report("\nexports", start_s, end_s)
        assert client.gaps_s(start_s, end_s)[-1] < STALL_MAX_S
        assert peak_bytes(router) - before_bytes < _GROWTH_BYTES_MAX
        stub: Any = trace_pb2_grpc.TraceServiceStub(it.internal_channel)
        listed = await stub.ListTraces(
            trace_pb2.ListTracesRequest(page_size=1_000), timeout=DEADLINE_S
        )
        assert trace_id in {trace.trace_id for trace in listed.traces}
        # An operator reads traces and writes none.
        refused: Any = it.internal_channel.unary_unary(_EXPORT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused(bodies[0], timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
