"""Requests that stream from decode workers directly count until they have ended, and have a complete trace."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import QueueFull
from headrace_common.latency.parts import Part
from headrace_common.rpc.status import error_from_rpc
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import PART_ATTRIBUTES
from headrace_common.trace_view.reading import read_trace
from headrace_router.tracing.service import SpanCollector
from tests.component.router.fakes import Rig, hand_over, reply
from tests.waiting import until


async def route(rig: Rig) -> inference_pb2.RouteResponse:
    request = inference_pb2.GenerateRequest(text="a prompt")
    routed: inference_pb2.RouteResponse = await rig.stub.Route(
        inference_pb2.RouteRequest(request=request), timeout=5
    )
    return routed


def decode_spans(
    direct: inference_pb2.DirectRequest, worker_id: str = "d0"
) -> trace_service_pb2.ExportTraceServiceRequest:
    """The spans of a request that has reserved for 2 ms, waited 3 ms, computed 4 ms and generated for 5 ms."""
    start_ns = time.time_ns()

    def span(name: str, start_ms: int, end_ms: int, parent: bytes = b"decode..") -> trace_pb2.Span:
        return trace_pb2.Span(
            name=name,
            trace_id=trace_id,
            span_id=name[-8:].encode(),
            parent_span_id=parent,
            start_time_unix_nano=start_ns + 1_000_000 * start_ms,
            end_time_unix_nano=start_ns + 1_000_000 * end_ms,
        )

    trace_id = bytes.fromhex(direct.traceparent.split("-")[1])
    transfer = common_pb2.KeyValue(
        key=schema.ATTRIBUTE_TRANSFER_ID,
        value=common_pb2.AnyValue(string_value=direct.transfer_id),
    )
    wait = common_pb2.KeyValue(
        key=schema.ATTRIBUTE_DECODE_WAIT_MS, value=common_pb2.AnyValue(double_value=3.0)
    )
    spans = [
        span(schema.SPAN_DECODE_RESERVE, 0, 2),
        span(schema.SPAN_DECODE_FIRST_TOKEN, 2, 9),
        span(schema.SPAN_DECODE_GENERATE, 9, 14),
        span(schema.SPAN_DECODE, 0, 15, b"attempt."),
    ]
    spans[1].attributes.append(wait)
    spans[-1].attributes.append(transfer)
    spans[-1].span_id = b"decode.."
    scope = trace_pb2.ScopeSpans(spans=spans)
    worker = common_pb2.KeyValue(
        key="service.instance.id", value=common_pb2.AnyValue(string_value=worker_id)
    )
    resource = resource_pb2.Resource(attributes=[worker])
    return trace_service_pb2.ExportTraceServiceRequest(
        resource_spans=[trace_pb2.ResourceSpans(resource=resource, scope_spans=[scope])]
    )


async def test_a_ticket_counts_as_a_request_until_its_stream_has_ended() -> None:
    rig = await Rig(look_aside=True, max_concurrent_requests=1, admission_wait_s=0.05).start()
    try:
        await rig.add_decode(reply("abc"))
        routed = await route(rig)
        assert len(rig.router.direct) == 1
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await route(rig)
        assert isinstance(error_from_rpc(raised.value), QueueFull)
        collector = SpanCollector(rig.router.traces.add_batch, rig.router.direct.on_batch)
        await collector.collect(decode_spans(routed.direct).SerializeToString())
        assert len(rig.router.direct) == 0
        rig.telemetry.force_flush()
        trace_id = routed.direct.traceparent.split("-")[1]
        spans = {span.name: span for span in rig.router.traces.get(trace_id).spans}
        assert spans[schema.SPAN_STREAM].duration.ToMilliseconds() == 5
        root = spans[schema.SPAN_REQUEST].span_id
        first = spans[schema.SPAN_FIRST_TOKEN]
        assert first.parent_span_id == root
        parts = {
            part: int(first.attributes[name])
            for part, name in PART_ATTRIBUTES.items()
            if name in first.attributes
        }
        assert sum(parts.values()) == int(first.attributes[schema.ATTRIBUTE_LATENCY_TOTAL_US])
        assert parts[Part.DECODE_WAIT] == pytest.approx(3_000, abs=2)
        assert parts[Part.PREFILL] == pytest.approx(4_000, abs=2)
        assert parts[Part.RESERVE] == pytest.approx(2_000, abs=2)
        assert schema.ATTRIBUTE_CLOCK_AHEAD_MS in spans[schema.SPAN_DECODE].attributes
        view = read_trace(rig.router.traces.get(trace_id))
        assert view.ttft_ns == 1_000 * sum(parts.values())
        assert view.total_ns > view.ttft_ns
        await route(rig)
    finally:
        await rig.close()


async def test_an_unused_ticket_is_released() -> None:
    rig = await Rig(look_aside=True, max_concurrent_requests=1, ticket_ttl_s=0.3).start()
    try:
        await rig.add_decode(reply("abc"))
        await route(rig)
        await until(lambda: not len(rig.router.direct))
        await asyncio.wait_for(route(rig), 5)
    finally:
        await rig.close()


async def test_a_caller_that_never_uses_its_tickets_leaves_room_for_others() -> None:
    rig = await Rig(look_aside=True, max_concurrent_requests=3, max_unused_tickets=2).start()
    try:
        await rig.add_decode(reply("abc"))
        routed = [await route(rig) for _ in range(20)]
        assert [response.HasField("direct") for response in routed] == [True] * 2 + [False] * 18
        assert len(rig.router.direct) == 2
        # A request of another client, and the same caller's own request through the router.
        assert (await rig.ask(request_id="r1"))[-1].finish_reason
        collector = SpanCollector(rig.router.traces.add_batch, rig.router.direct.on_batch)
        await collector.collect(decode_spans(routed[0].direct).SerializeToString())
        assert (await route(rig)).HasField("direct")
    finally:
        await rig.close()


async def test_with_api_keys_each_tenant_has_its_own_bound(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a tenant-a\nkey-b tenant-b\n")
    rig = await Rig(look_aside=True, max_unused_tickets=1, api_keys_file=str(keys)).start()
    try:
        await rig.add_decode(reply("abc"))
        granted = []
        for key in ("key-a", "key-a", "key-b"):
            request = inference_pb2.RouteRequest(request=inference_pb2.GenerateRequest(text="x"))
            metadata = (("x-api-key", key),)
            response = await rig.stub.Route(request, timeout=5, metadata=metadata)
            granted.append(response.HasField("direct"))
        assert granted == [True, False, True]
    finally:
        await rig.close()


async def test_a_handed_over_prompt_confirms_its_ticket() -> None:
    rig = await Rig(look_aside=True, max_unused_tickets=1).start()
    try:
        await rig.add_decode(reply("abc"))
        await rig.add_prefill(hand_over)
        request = inference_pb2.GenerateRequest(
            text="a prompt", prefill_placement=inference_pb2.PREFILL_PLACEMENT_REMOTE
        )
        routed = await rig.stub.Route(inference_pb2.RouteRequest(request=request), timeout=5)
        assert not (await route(rig)).HasField("direct")
        await rig.stub.Prefill(inference_pb2.PrefillRequest(direct=routed.direct), timeout=5)
        assert (await route(rig)).HasField("direct")
        assert len(rig.router.direct) == 2
    finally:
        await rig.close()
