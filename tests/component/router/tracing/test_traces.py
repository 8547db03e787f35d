"""Traces of requests, as TraceService shows them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.trace import use_span

from headrace.inference.v1 import trace_pb2, trace_pb2_grpc
from headrace.prefill.v1 import prefill_pb2
from headrace_common.config import ServiceConfig
from headrace_common.rpc.trace_context import context_from_traceparent
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_router.tracing.service import EXPORT_BYTES_MAX, OTLP_SERVICE_NAME
from tests.kit.router import Rig
from tests.kit.workers import FakeDecode, FakePrefill, hand_over, reply
from tests.waiting import PATIENCE_S


@dataclass
class Workers:
    """The telemetry of a prefill and a decode process."""

    prefill: Telemetry
    decode: Telemetry


@pytest.fixture
async def workers(rig: Rig) -> Any:
    made = Workers(
        init_telemetry("prefill", "p0", ServiceConfig(traces_sampler="always_on")),
        init_telemetry("decode", "d0", ServiceConfig(traces_sampler="always_on")),
    )
    for telemetry in (made.prefill, made.decode):
        telemetry.set_collectors([rig.internal_endpoint])
    yield made
    await asyncio.to_thread(made.prefill.shutdown)
    await asyncio.to_thread(made.decode.shutdown)


async def _complete_trace(rig: Rig, name: str) -> trace_pb2.Trace:
    """Waits for the spans of the workers, which arrive after the response."""
    stub: Any = trace_pb2_grpc.TraceServiceStub(rig.internal_channel)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            response = await stub.GetTrace(trace_pb2.GetTraceRequest(id=name), timeout=PATIENCE_S)
            trace: trace_pb2.Trace = response.trace
            if trace.complete:
                return trace
            await asyncio.sleep(0.05)


def _by_name(trace: trace_pb2.Trace) -> dict[str, trace_pb2.Span]:
    return {span.name: span for span in trace.spans}


async def test_one_trace_covers_all_processes_of_a_request(rig: Rig, workers: Workers) -> None:
    async def prefill(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        parent = context_from_traceparent(task.traceparent)
        span = workers.prefill.start_span(schema.SPAN_PREFILL, parent)
        await hand_over(worker, task)
        span.end()

    generate = reply("Paris")

    async def decode(worker: FakeDecode, request: Any) -> Any:
        parent = context_from_traceparent(str(worker.metadata[-1]["traceparent"]))
        with use_span(workers.decode.start_span(schema.SPAN_DECODE, parent), end_on_exit=True):
            async for event in generate(worker, request):
                yield event

    await rig.add_decode(decode)
    await rig.add_prefill(prefill)
    responses = await rig.ask("capital?", request_id="r1")
    trace = await _complete_trace(rig, "r1")
    assert trace.trace_id == responses[0].trace_id
    spans = _by_name(trace)
    root, attempt = spans[schema.SPAN_REQUEST], spans[schema.SPAN_ATTEMPT]
    for name in (
        schema.SPAN_TOKENIZE,
        schema.SPAN_ROUTE,
        schema.SPAN_ATTEMPT,
        schema.SPAN_FIRST_TOKEN,
        schema.SPAN_STREAM,
    ):
        assert spans[name].parent_span_id == root.span_id, name
    for name in (schema.SPAN_RESERVE, schema.SPAN_QUEUE, schema.SPAN_PREFILL, schema.SPAN_DECODE):
        assert spans[name].parent_span_id == attempt.span_id, name
    assert len(trace.spans) == 10
    assert (spans[schema.SPAN_DECODE].service, spans[schema.SPAN_DECODE].worker_id) == (
        "decode",
        "d0",
    )
    assert root.attributes[schema.ATTRIBUTE_COMPLETION_TOKENS] == "5"
    total_us = int(root.attributes[schema.ATTRIBUTE_LATENCY_TOTAL_US])
    assert float(root.attributes[schema.ATTRIBUTE_GEN_AI_TTFT_S]) == pytest.approx(total_us / 1e6)
    (attempt,) = (span for span in trace.spans if span.name == schema.SPAN_ATTEMPT)
    assert int(attempt.attributes[schema.ATTRIBUTE_SERVER_PORT]) > 0
    assert attempt.attributes[schema.ATTRIBUTE_SERVER_ADDRESS] == "127.0.0.1"
    assert root.attributes[schema.ATTRIBUTE_FINISH_REASON] == "length"
    assert attempt.attributes[schema.ATTRIBUTE_PREFILL_WORKER_ID] == "p0"
    assert "cheapest of 1" in spans[schema.SPAN_ROUTE].attributes[schema.ATTRIBUTE_EXPLANATION]
    first_token = responses[-1].timing.time_to_first_token.ToNanoseconds()
    assert spans[schema.SPAN_FIRST_TOKEN].duration.ToNanoseconds() == first_token


async def test_a_rejected_request_has_a_complete_trace(rig: Rig) -> None:
    await rig.error_of(text="x" * 2_000, request_id="r1")
    trace = await rig.trace_of("")
    assert trace.complete
    spans = _by_name(trace)
    assert set(spans) == {schema.SPAN_REQUEST, schema.SPAN_TOKENIZE, schema.SPAN_ROUTE}
    assert "no live decode worker" in spans[schema.SPAN_REQUEST].error


async def test_an_export_beyond_the_bound_is_refused_by_name(rig: Rig) -> None:
    export: Any = rig.internal_channel.unary_unary(f"/{OTLP_SERVICE_NAME}/Export")
    await export(b"", timeout=PATIENCE_S)
    for data, why in (
        (b"\0" * (EXPORT_BYTES_MAX + 1), "at most"),
        (b"\0" * EXPORT_BYTES_MAX, "cannot be parsed"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=why) as raised:
            await export(data, timeout=PATIENCE_S)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
