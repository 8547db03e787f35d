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
