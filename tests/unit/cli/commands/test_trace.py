"""The summary that `headrace trace` prints under the waterfall."""

from __future__ import annotations

from headrace.inference.v1 import trace_pb2
from headrace_cli.commands.trace import transfer_text, ways_text
from headrace_common.telemetry import schema
from tests.transfer_links import packed

MS = 10**6


def link(
    start_ms: int, length_ms: int, *, ranks: tuple[int, int] = (0, 0), way: str = ""
) -> trace_pb2.Span:
    """A link with three layers."""
    transport, _, strategy = way.partition(", ")
    writes = [(layer, 0, 8, 2048, 0, 0, 0, 0, 0, 0, 500, 0) for layer in range(3)]
    span = trace_pb2.Span(
        name=schema.SPAN_TRANSFER_LINK,
        attributes={
            schema.ATTRIBUTE_SOURCE_RANK: str(ranks[0]),
            schema.ATTRIBUTE_DESTINATION_RANK: str(ranks[1]),
            schema.ATTRIBUTE_PAYLOAD_BYTES: "6144",
            schema.ATTRIBUTE_WRITES: "3",
            schema.ATTRIBUTE_RUNS: "1800",
            schema.ATTRIBUTE_ENTRIES: "6",
            schema.ATTRIBUTE_TRANSPORT: transport,
            schema.ATTRIBUTE_STRATEGY: strategy,
            schema.ATTRIBUTE_LINK_LAYERS: packed(*writes),
        },
    )
    span.start_time.FromNanoseconds(10**18 + start_ms * MS)
    span.duration.FromNanoseconds(length_ms * MS)
    return span


def test_one_way_is_named_once() -> None:
    spans = [link(0, 3, way="mooncake/tcp, gather_scatter")]
    spans.append(
        trace_pb2.Span(
            name=schema.SPAN_PREFILL,
            attributes={
                schema.ATTRIBUTE_TRANSFER_MS: "3",
                schema.ATTRIBUTE_EXPOSED_MS: "0.5",
                schema.ATTRIBUTE_CONTROL_BYTES: "300",
            },
        )
    )
    assert transfer_text(trace_pb2.Trace(spans=spans)) == (
        "3 layers in 3 writes, 6.0 KiB, 3.00 ms from the first layer to the last write, 0.50 ms of it after the last "
        "layer\n"
        "by mooncake/tcp, gather_scatter; 1,800 runs in 6 entries, 300 B of control messages"
    )


def test_different_ways_name_their_rank_pairs() -> None:
    near = [link(0, 1, ranks=(rank, rank), way="same_host, direct") for rank in range(5, -1, -1)]
    far = [link(0, 1, ranks=(1, 0), way="mooncake/tcp, direct+gather_scatter")]
    assert ways_text(near + far) == (
        "1>0 by mooncake/tcp, direct+gather_scatter; 0>0, 1>1, 2>2, 3>3 and 2 more by same_host, direct"
    )


def test_spans_without_transport_attributes_are_shown() -> None:
    old = link(0, 1)
    assert transfer_text(trace_pb2.Trace(spans=[old])) == "3 layers in 3 writes, 6.0 KiB"
    assert transfer_text(trace_pb2.Trace()) == ""
