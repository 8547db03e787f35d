"""One complete trace per request across all processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from headrace.inference.v1 import inference_pb2, trace_pb2
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import unpack_writes
from tests.span_schema import ATTRIBUTES
from tests.suite.deployment import prompt_of, suite

LAYERS = 7
REMOTE_SPANS = (
    schema.SPAN_REQUEST,
    schema.SPAN_TOKENIZE,
    schema.SPAN_ROUTE,
    schema.SPAN_ATTEMPT,
    schema.SPAN_RESERVE,
    schema.SPAN_QUEUE,
    schema.SPAN_FIRST_TOKEN,
    schema.SPAN_STREAM,
    schema.SPAN_PREFILL,
    schema.SPAN_PREFILL_COMPUTE,
    schema.SPAN_TRANSFER_LINK,
    schema.SPAN_DECODE,
    schema.SPAN_DECODE_RESERVE,
    schema.SPAN_DECODE_KV_WAIT,
    schema.SPAN_TRANSFER,
    schema.SPAN_DECODE_FIRST_TOKEN,
    schema.SPAN_DECODE_GENERATE,
)
MODEL = (
    ("prefill", "model", f"sim:layers={LAYERS}"),
    ("decode", "model", f"sim:layers={LAYERS}"),
)


def start_ns(span: trace_pb2.Span) -> int:
    return span.start_time.ToNanoseconds()


def clock_error_ns(span: trace_pb2.Span) -> int:
    return round(1e6 * float(span.attributes[schema.ATTRIBUTE_CLOCK_ERROR_MS]))


def end_ns(span: trace_pb2.Span) -> int:
    return start_ns(span) + span.duration.ToNanoseconds()


async def test_every_step_of_a_request_is_in_its_trace_once(tmp_path: Path) -> None:
    async with suite(tmp_path, settings=MODEL) as it:
        # At once, so that each trace could contain spans of the other requests.
        outcomes = await asyncio.gather(
            *(it.generate(prompt_of(50, n), 6, request_id=f"mine-{n}") for n in range(6))
        )
        for number, outcome in enumerate(outcomes):
            trace = await it.trace(outcome.trace_id)
            assert trace.complete
            assert trace.request_id == f"mine-{number}"
            check_steps(trace)
            check_times_and_parents(trace)
        assert (await it.trace("mine-0")).trace_id == outcomes[0].trace_id


def check_steps(trace: trace_pb2.Trace) -> None:
    names = Counter(span.name for span in trace.spans)
    assert names == dict.fromkeys(REMOTE_SPANS, 1)
    (link,) = (s.attributes for s in trace.spans if s.name == schema.SPAN_TRANSFER_LINK)
    writes = unpack_writes(link[schema.ATTRIBUTE_LINK_LAYERS])
    assert [write.layer for write in writes] == list(range(LAYERS))
    # 49 tokens of two heads of 16 bytes each.
    assert {write.payload_bytes for write in writes} == {49 * 2 * 16}
    assert link[schema.ATTRIBUTE_PAYLOAD_BYTES] == str(LAYERS * 49 * 2 * 16)
    assert link[schema.ATTRIBUTE_TRANSPORT] == "mooncake/tcp"
    assert set(link[schema.ATTRIBUTE_STRATEGY].split("+")) <= {
        "direct",
        "gather",
        "scatter",
        "gather_scatter",
    }
    assert int(link[schema.ATTRIBUTE_ENTRIES]) >= LAYERS
    assert link[schema.ATTRIBUTE_LINK_KIND] == "same_host"
    (prefill,) = (s for s in trace.spans if s.name == schema.SPAN_PREFILL)
    assert int(prefill.attributes[schema.ATTRIBUTE_PAYLOAD_BYTES]) == LAYERS * 49 * 2 * 16
    assert 0 < int(prefill.attributes[schema.ATTRIBUTE_CONTROL_BYTES]) < 100 * LAYERS
    assert not any(span.error for span in trace.spans)
    assert {
        (span.name, name) for span in trace.spans for name in span.attributes
    } <= ATTRIBUTES.keys()


def check_times_and_parents(trace: trace_pb2.Trace) -> None:
    by_id = {span.span_id: span for span in trace.spans}
    roots = [span.name for span in trace.spans if span.parent_span_id not in by_id]
    assert roots == [schema.SPAN_REQUEST]
    edges = {
        (by_id[span.parent_span_id].service, span.service)
        for span in trace.spans
        if span.parent_span_id in by_id and by_id[span.parent_span_id].service != span.service
    }
    assert edges == {("router", "prefill"), ("router", "decode")}
    workers = {(span.service, span.worker_id) for span in trace.spans}
    assert {("prefill", "prefill-0"), ("decode", "decode-0")} <= workers
    named = {span.name: span for span in trace.spans}
    wait, compute = named[schema.SPAN_DECODE_KV_WAIT], named[schema.SPAN_PREFILL_COMPUTE]
    # The times of two processes are compared by clock offsets, which have errors.
    error_ns = clock_error_ns(wait) + clock_error_ns(compute)
    assert start_ns(wait) <= start_ns(compute) + error_ns
    assert start_ns(compute) <= end_ns(compute) <= end_ns(wait) + error_ns
    assert end_ns(wait) <= end_ns(named[schema.SPAN_DECODE_FIRST_TOKEN])
    for child in trace.spans:
        if child.service == "decode" and child.name != schema.SPAN_DECODE:
            assert child.parent_span_id == named[schema.SPAN_DECODE].span_id


async def test_a_local_request_has_no_transfer_in_its_trace(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:
        outcome = await it.generate(
            prompt_of(50, 1), 6, placement=inference_pb2.PREFILL_PLACEMENT_LOCAL
        )
        trace = await it.trace(outcome.trace_id)
        assert trace.complete
        names = Counter(span.name for span in trace.spans)
        assert schema.SPAN_TRANSFER_LINK not in names
        assert schema.SPAN_DECODE_KV_WAIT not in names
        assert {span.service for span in trace.spans} == {"router", "decode"}
