"""Reading traces: parts, links and steps."""

from __future__ import annotations

import struct
from base64 import b64encode

from headrace.inference.v1 import trace_pb2
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import VERSION
from headrace_common.trace_view.reading import read_trace

MS = 10**6
ORIGIN_NS = 1_700_000_000 * 10**9


def span(
    name: str, span_id: str, parent: str, times_ms: tuple[float, float], **attributes: str
) -> trace_pb2.Span:
    service = {"p": "prefill", "d": "decode"}.get(span_id[0], "router")
    worker = {"prefill": "prefill-1", "decode": "decode-0", "router": ""}[service]
    made = trace_pb2.Span(
        span_id=span_id,
        parent_span_id=parent,
        name=name,
        service=service,
        worker_id=worker,
        attributes=attributes,
    )
    made.start_time.FromNanoseconds(ORIGIN_NS + int(times_ms[0] * MS))
    made.duration.FromNanoseconds(int((times_ms[1] - times_ms[0]) * MS))
    return made


def packed(*writes: tuple[int, int, int, int]) -> str:
    """Writes of (layer, bytes, ready_us, move_us), one after the other."""
    words = [VERSION]
    for layer, size, ready_us, move_us in writes:
        words += [layer, 0, 10, size, ready_us, 0, 0, 5, 0, 0, move_us, 1]
    return b64encode(struct.pack(f"<{len(words)}I", *words)).decode()


def request(**attributes: str) -> list[trace_pb2.Span]:
    return [
        span(schema.SPAN_REQUEST, "r", "", (0, 120), **attributes),
        span(schema.SPAN_FIRST_TOKEN, "f", "r", (0, 100)),
        span(schema.SPAN_ATTEMPT, "a", "r", (4, 118), **{schema.ATTRIBUTE_DECODE_WORKER_ID: "decode-0"}),
        span(schema.SPAN_QUEUE, "q", "a", (5, 15)),
        span(schema.SPAN_PREFILL, "p", "a", (15, 70)),
        span(schema.SPAN_PREFILL_COMPUTE, "pc", "p", (16, 56)),
        span(schema.SPAN_DECODE_KV_WAIT, "dw", "a", (5, 90)),
    ]  # fmt: skip


def test_reported_parts_are_taken_as_they_are() -> None:
    reported = {
        schema.ATTRIBUTE_LATENCY_QUEUE_US: "20000",
        schema.ATTRIBUTE_LATENCY_TRANSFER_EXPOSED_US: "79000",
        schema.ATTRIBUTE_LATENCY_UNACCOUNTED_US: "1000",
    }
    view = read_trace(trace_pb2.Trace(spans=request(**reported)))
    assert [(part.name, part.duration_ns) for part in view.parts] == [
        ("queue", 20 * MS),
        ("transfer exposed", 79 * MS),
        ("unaccounted", MS),
    ]
    assert view.ttft_ns == 100 * MS
    assert view.largest_part is not None
    assert view.largest_part.name == "transfer exposed"


def test_a_request_that_has_not_ended_has_no_parts() -> None:
    view = read_trace(trace_pb2.Trace(spans=request()[1:]))
    assert (view.parts, view.ttft_ns, view.largest_part) == ((), 0, None)


def test_a_link_has_its_layers_and_its_speed() -> None:
    link = span(
        schema.SPAN_TRANSFER_LINK,
        "pl",
        "p",
        (20, 90),
        **{
            schema.ATTRIBUTE_SOURCE_RANK: "2",
            schema.ATTRIBUTE_DESTINATION_RANK: "1",
            schema.ATTRIBUTE_PAYLOAD_BYTES: "3000000",
            schema.ATTRIBUTE_MOVING_MS: "10.0",
            schema.ATTRIBUTE_LINK_LAYERS: packed((0, 1_000_000, 0, 4_000), (1, 2_000_000, 9_000, 6_000)),
        },
    )  # fmt: skip
    (found,) = read_trace(trace_pb2.Trace(spans=[*request(), link])).links
    assert found.name == "prefill-1/r2 -> decode-0/r1"
    assert found.gb_s == 0.3
    assert [write.layer for write in found.writes] == [0, 1]
    assert found.writes[0].ready_ns == 20 * MS
    assert found.end_ns == 20 * MS + 15_005_000
    assert found.last_write is not None
    assert (found.last_write.cause, found.writes[0].cause) == ("move", "move")


def test_writes_of_single_layers_count_where_no_link_is_there() -> None:
    layers = [
        span(
            schema.SPAN_TRANSFER_LAYER,
            f"p{n}",
            "p",
            (20 + 2 * n, 23 + 2 * n),
            **{schema.ATTRIBUTE_LAYER: str(n), schema.ATTRIBUTE_PAYLOAD_BYTES: "1000"},
        )
        for n in range(4)
    ]
    (found,) = read_trace(trace_pb2.Trace(spans=[*request(), *layers])).links
    # They overlap: 20 to 29.
    assert found.moving_ns == 9 * MS
    assert found.payload_bytes == 4_000


def test_steps_are_a_tree_even_if_parents_are_missing_or_go_in_circles() -> None:
    spans = [*request(), span("x", "x", "y", (1, 2)), span("y", "y", "x", (1, 2))]
    spans.append(span("orphan", "o", "gone", (3, 4)))
    steps = read_trace(trace_pb2.Trace(spans=spans)).steps
    assert [(step.depth, step.label) for step in steps if step.label in ("orphan", "queue")] == [
        (2, "queue"),
        (0, "orphan"),
    ]
    assert read_trace(trace_pb2.Trace()).parts == ()
