"""The summary that `headrace trace` prints under the waterfall."""

from __future__ import annotations

from headrace.inference.v1 import trace_pb2
from headrace_cli.commands.trace import busy_ns, transfer_text, ways_text
from headrace_common.telemetry import schema

MS = 10**6


def write(
    layer: int, start_ms: int, length_ms: int, *, ranks: tuple[int, int] = (0, 0), way: str = ""
) -> trace_pb2.Span:
    transport, _, strategy = way.partition(", ")
    span = trace_pb2.Span(
        name=schema.SPAN_TRANSFER_LAYER,
        attributes={
            schema.ATTRIBUTE_LAYER: str(layer),
            schema.ATTRIBUTE_SOURCE_RANK: str(ranks[0]),
            schema.ATTRIBUTE_DESTINATION_RANK: str(ranks[1]),
            schema.ATTRIBUTE_PAYLOAD_BYTES: "2048",
            schema.ATTRIBUTE_RUNS: "600",
            schema.ATTRIBUTE_ENTRIES: "2",
            schema.ATTRIBUTE_TRANSPORT: transport,
            schema.ATTRIBUTE_STRATEGY: strategy,
        },
    )
    span.start_time.FromNanoseconds(10**18 + start_ms * MS)
    span.duration.FromNanoseconds(length_ms * MS)
    return span


def test_one_way_is_named_once() -> None:
    spans = [write(layer, layer, 1, way="mooncake/tcp, gather_scatter") for layer in range(3)]
    spans.append(
        trace_pb2.Span(
            name=schema.SPAN_PREFILL,
            attributes={
                schema.ATTRIBUTE_EXPOSED_MS: "0.5",
                schema.ATTRIBUTE_CONTROL_BYTES: "300",
            },
        )
    )
    assert transfer_text(trace_pb2.Trace(spans=spans)) == (
        "3 layers in 3 writes, 6.0 KiB, 3.00 ms of writing, 0.50 ms of it after the last layer was computed\n"
        "by mooncake/tcp, gather_scatter; 1,800 runs in 6 entries, 300 B of control messages"
    )


def test_different_ways_name_their_rank_pairs() -> None:
    near = [
        write(0, 0, 1, ranks=(rank, rank), way="same_host, direct") for rank in range(5, -1, -1)
    ]
    far = [
        write(layer, 0, 1, ranks=(1, 0), way="mooncake/tcp, direct+gather_scatter")
        for layer in range(2)
    ]
    assert ways_text(near + far) == (
        "1>0 by mooncake/tcp, direct+gather_scatter; 0>0, 1>1, 2>2, 3>3 and 2 more by same_host, direct"
    )


def test_overlapping_writes_are_counted_once_per_rank() -> None:
    spans = [write(0, 0, 10), write(1, 5, 10), write(2, 6, 2), write(3, 20, 1)]
    assert busy_ns(spans) == 16 * MS
    assert busy_ns([*spans, write(0, 0, 10, ranks=(1, 0))]) == 26 * MS


def test_spans_without_transport_attributes_are_shown() -> None:
    old = write(0, 0, 1)
    assert transfer_text(trace_pb2.Trace(spans=[old])).endswith("1.00 ms of writing")
    assert transfer_text(trace_pb2.Trace()) == ""
