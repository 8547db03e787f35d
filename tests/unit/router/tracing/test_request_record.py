"""The spans that a router makes from the record of a request."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceState

from headrace.prefill.v1 import prefill_pb2
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import pack_writes
from headrace_common.trace_view.reading import read_trace
from headrace_router.tracing.store import TraceLimits, TraceStore
from tests.span_schema import problems_of
from tests.unit.router.tracing.records import START_UNIX_NS, attempt, ended, failed_attempt


def named(spans: Iterable[ReadableSpan]) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in spans:
        found.setdefault(span.name, []).append(span)
    return found


def times_us(span: ReadableSpan) -> tuple[float, float]:
    """After the request's arrival."""
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - START_UNIX_NS) / 1e3, (span.end_time - START_UNIX_NS) / 1e3


def test_ids_are_different_and_stay_the_same() -> None:
    attempts = (failed_attempt(), attempt(remote=True))
    record = ended(*attempts)

    def made() -> list[ReadableSpan]:
        workers = [
            span
            for one in attempts
            for service in ("decode", "prefill")
            for span in one.worker_spans(record, service)
        ]
        return [*record.spans(), *workers]

    ids = [span.context and span.context.span_id for span in made()]
    assert len(set(ids)) == len(ids) == 11 + 5 + 2
    assert ids == [span.context and span.context.span_id for span in made()]


def test_the_last_link_is_named_without_spans_of_the_worker() -> None:
    facts = attempt(remote=True)
    # Layer 5 was ready after 300 us and landed 40 us later.
    layers = pack_writes(array("I", (5, 0, 8, 64, 300, 0, 0, 10, 0, 0, 30, 5)))
    last_link = prefill_pb2.SentLink(
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
    facts.done = prefill_pb2.TaskDone(cached_tokens=16, payload_bytes=64, last_link=last_link)
    record = ended(facts)
    facts.task_tokens = 20
    compute = facts.worker_spans(record, "prefill")[1]
    assert compute.attributes == {schema.ATTRIBUTE_CACHED_TOKENS: 16, schema.ATTRIBUTE_TOKENS: 4}
    link = facts.worker_spans(record, "prefill")[-1]
    assert (link.name, times_us(link)) == (schema.SPAN_TRANSFER_LINK, (330, 675))
    assert not list(problems_of(link))
    store = TraceStore(TraceLimits(1))
    store.start_trace(record.trace_id, "r1", START_UNIX_NS)
    store.end_request(record)
    view = read_trace(store.get("r1"))
    assert view.last_link is not None
    assert view.last_link.name == "prefill-0/r2 -> decode-0/r1"
    assert view.last_link.last_write is not None
    assert (view.last_link.last_write.layer, view.last_link.last_write.cause) == (5, "compute")


def test_a_task_that_no_worker_pulled_has_failed_in_the_queue() -> None:
    waiting = attempt(remote=True)
    waiting.pulled = None
    (queue,) = named(ended(waiting).spans())[schema.SPAN_QUEUE]
    assert (queue.status.description, times_us(queue)) == ("never pulled", (260, 900))


def test_a_pause_between_two_attempts_has_a_span() -> None:
    failed, later = failed_attempt(), attempt(remote=False)
    assert schema.SPAN_BACK_OFF not in named(ended(failed, later).spans())
    later.start = 100_190
    (pause,) = named(ended(failed, later).spans())[schema.SPAN_BACK_OFF]
    assert times_us(pause) == (190, 100_190)


def test_a_root_has_the_span_and_the_state_of_its_caller() -> None:
    record = ended(attempt(remote=False))
    record.parent = SpanContext(record.context.trace_id, 0x1234, True)
    record.context = SpanContext(
        record.context.trace_id, 5, False, trace_state=TraceState([("vendor", "x")])
    )
    store = TraceStore(TraceLimits(1))
    store.start_trace(record.trace_id, "r1", START_UNIX_NS)
    store.end_request(record)
    root = next(span for span in store.get("r1").spans if span.name == schema.SPAN_REQUEST)
    assert (root.parent_span_id, root.trace_state) == ("0000000000001234", "vendor=x")
