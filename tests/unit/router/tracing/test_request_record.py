"""The spans that a router makes from the record of a request."""

from __future__ import annotations

from array import array

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from headrace.prefill.v1 import prefill_pb2
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import pack_writes
from headrace_common.trace_view.reading import read_trace
from headrace_router.tracing.record import TraceRecord, trace_to_proto
from tests.span_schema import problems_of
from tests.unit.router.tracing.records import START_UNIX_NS, attempt, ended, failed_attempt

RESOURCE = Resource({"service.name": "headrace-router"})


def named(spans: list[ReadableSpan]) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in spans:
        found.setdefault(span.name, []).append(span)
    return found


def times_us(span: ReadableSpan) -> tuple[float, float]:
    """After the request's arrival."""
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - START_UNIX_NS) / 1e3, (span.end_time - START_UNIX_NS) / 1e3


def test_each_step_of_the_router_is_a_span() -> None:
    record = ended(attempts=(failed_attempt(), attempt(remote=True)))
    spans = record.spans(RESOURCE)
    found = named(spans)
    assert {name: [times_us(one) for one in many] for name, many in found.items()} == {
        schema.SPAN_REQUEST: [(0, 1_000)],
        schema.SPAN_TOKENIZE: [(10, 90)],
        schema.SPAN_ROUTE: [(100, 110), (200, 210)],
        schema.SPAN_ATTEMPT: [(110, 190), (210, 900)],
        schema.SPAN_RESERVE: [(110, 190), (210, 250)],
        schema.SPAN_QUEUE: [(260, 300)],
        schema.SPAN_FIRST_TOKEN: [(0, 800)],
        schema.SPAN_STREAM: [(800, 900)],
    }
    failed, second = found[schema.SPAN_ATTEMPT]
    assert (failed.status.description, second.status.description) == ("it is full", None)
    assert second.attributes is not None
    assert second.attributes[schema.ATTRIBUTE_SERVER_ADDRESS] == "::1"
    assert [link.context.span_id for link in second.links] == [66]
    assert second.kind is SpanKind.CLIENT
    (root,) = found[schema.SPAN_REQUEST]
    assert root.attributes is not None
    parts_us = sum(
        int(str(value))
        for name, value in root.attributes.items()
        if name.startswith("headrace.latency.") and name.endswith("_us")
    )
    total_us = root.attributes[schema.ATTRIBUTE_LATENCY_TOTAL_US]
    hidden_us = root.attributes[schema.ATTRIBUTE_TRANSFER_HIDDEN_US]
    assert parts_us - int(str(hidden_us)) == 2 * int(str(total_us))
    for span in spans:
        assert span.context is not None
        assert span.context.trace_flags.sampled
        assert span.resource is RESOURCE
        assert not list(problems_of(span))


def test_ids_are_different_and_stay_the_same() -> None:
    record = ended(attempts=(failed_attempt(), attempt(remote=True)))

    def made() -> list[ReadableSpan]:
        workers = [
            one.span
            for number in range(2)
            for service in ("decode", "prefill")
            for one in record.worker_spans(number, service)
        ]
        return [*record.spans(), *workers]

    ids = [span.context and span.context.span_id for span in made()]
    assert len(set(ids)) == len(ids) == 11 + 5 + 2
    assert ids == [span.context and span.context.span_id for span in made()]


def test_spans_of_workers_are_made_from_their_reports() -> None:
    record = ended(attempts=(attempt(remote=True),))
    decode = record.worker_spans(0, "decode")
    assert [(one.worker_id, one.span.name, times_us(one.span)) for one in decode] == [
        ("decode-0", schema.SPAN_DECODE, (220, 900)),
        ("decode-0", schema.SPAN_DECODE_RESERVE, (220, 240)),
        ("decode-0", schema.SPAN_DECODE_KV_WAIT, (240, 700)),
        ("decode-0", schema.SPAN_DECODE_FIRST_TOKEN, (700, 800)),
        ("decode-0", schema.SPAN_DECODE_GENERATE, (800, 900)),
    ]
    prefill = record.worker_spans(0, "prefill")
    assert [(one.worker_id, one.span.name, times_us(one.span)) for one in prefill] == [
        ("prefill-0", schema.SPAN_PREFILL, (310, 710)),
        ("prefill-0", schema.SPAN_PREFILL_COMPUTE, (320, 600)),
    ]
    assert not ended(attempts=(failed_attempt(),)).worker_spans(0, "decode")
    for one in (*decode, *prefill):
        assert not list(problems_of(one.span))


def test_the_last_link_is_named_without_spans_of_the_worker() -> None:
    facts = attempt(remote=True)
    # Layer 5 was ready after 300 us and landed 40 us later.
    layers = pack_writes(array("I", (5, 0, 8, 64, 300, 0, 0, 10, 0, 0, 30, 5)))
    facts.last_link = prefill_pb2.SentLink(
        source_rank=2,
        destination_rank=1,
        transport="mooncake",
        strategy="direct",
        payload_bytes=64,
        moving_us=30,
        start_us=20,
        end_us=365,
        layers=layers,
    )
    record = ended(attempts=(facts,))
    link = record.worker_spans(0, "prefill")[-1].span
    assert (link.name, times_us(link)) == (schema.SPAN_TRANSFER_LINK, (330, 675))
    assert not list(problems_of(link))
    trace = TraceRecord("ab")
    assert trace.add_request(record, 1 << 20)
    view = read_trace(trace_to_proto(trace.summary(), trace.contents))
    assert view.last_link is not None
    assert view.last_link.name == "prefill-0/r2 -> decode-0/r1"
    assert view.last_link.last_write is not None
    assert (view.last_link.last_write.layer, view.last_link.last_write.cause) == (5, "compute")


def test_a_task_that_no_worker_pulled_has_failed_in_the_queue() -> None:
    waiting = attempt(remote=True)
    record = ended(attempts=(waiting,))
    (steps,) = record.steps.attempts
    object.__setattr__(steps, "pulled", None)
    (queue,) = named(record.spans())[schema.SPAN_QUEUE]
    assert (queue.status.description, times_us(queue)) == ("never pulled", (260, 900))
