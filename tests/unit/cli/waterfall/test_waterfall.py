"""The waterfall shows every span once and fits the terminal."""

from __future__ import annotations

import pytest

from headrace.inference.v1 import trace_pb2
from headrace_cli.waterfall.draw import draw_waterfall
from headrace_cli.waterfall.rows import trace_rows
from headrace_cli.waterfall.units import format_bytes, format_ms
from headrace_common.telemetry import schema
from tests.transfer_links import packed

MS = 10**6
# Six spans, and thirty layers of one of them.
ROWS = 36


def span(
    name: str,
    span_id: str,
    parent: str,
    start_ms: float,
    length_ms: float,
    service: str = "router",
    **attributes: str,
) -> trace_pb2.Span:
    message = trace_pb2.Span(
        span_id=span_id, parent_span_id=parent, name=name, service=service, attributes=attributes
    )
    message.start_time.FromNanoseconds(1_700_000_000 * 10**9 + int(start_ms * MS))
    message.duration.FromNanoseconds(int(length_ms * MS))
    return message


@pytest.fixture
def trace() -> trace_pb2.Trace:
    writes = [(layer, 0, 8, 98304, 1_000 * layer, 0, 0, 0, 0, 0, 500, 0) for layer in range(30)]
    link = span(schema.SPAN_TRANSFER_LINK, "l", "p", 10, 29.5, "prefill")
    link.attributes[schema.ATTRIBUTE_LINK_LAYERS] = packed(*writes)
    link.attributes[schema.ATTRIBUTE_PAYLOAD_BYTES] = str(30 * 98304)
    return trace_pb2.Trace(
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        request_id="r",
        complete=True,
        spans=[
            link,
            span(schema.SPAN_REQUEST, "r", "", 0, 100),
            span(schema.SPAN_ATTEMPT, "a", "r", 2, 98),
            span(schema.SPAN_PREFILL, "p", "a", 8, 40, "prefill"),
            span(schema.SPAN_DECODE, "d", "a", 3, 96, "decode"),
            span(schema.SPAN_DECODE_KV_WAIT, "w", "d", 4, 40, "decode"),
        ],
    )


def test_rows_are_a_tree_with_layers_in_order(trace: trace_pb2.Trace) -> None:
    rows = trace_rows(trace, layers=True)
    assert len(rows) == ROWS
    assert [(row.label, row.depth) for row in rows[:4]] == [
        ("request", 0),
        ("attempt", 1),
        ("decode", 2),
        ("kv wait", 3),
    ]
    assert [row.label.split()[1] for row in rows if row.label.startswith("layer")] == [
        str(layer) for layer in range(30)
    ]


def test_layers_fold_into_one_row(trace: trace_pb2.Trace) -> None:
    folded = [row for row in trace_rows(trace, layers=False) if "layers" in row.label]
    assert [(row.label, row.start_ns, row.duration_ns) for row in folded] == [
        ("30 layers 2.8 MiB", 10 * MS, int(29.5 * MS))
    ]


@pytest.mark.parametrize("width", [60, 80, 100, 400])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_no_line_is_wider_than_the_terminal(
    trace: trace_pb2.Trace, width: int, ascii_only: bool
) -> None:
    lines = draw_waterfall(trace, layers=True, width=width, ascii_only=ascii_only)
    assert len(lines) == 1 + ROWS
    assert max(line.cell_len for line in lines) <= width
    if ascii_only:
        assert all(line.plain.isascii() for line in lines)


def test_every_span_has_a_mark(trace: trace_pb2.Trace) -> None:
    lines = draw_waterfall(trace, layers=True, width=80, ascii_only=True)
    assert all("#" in line.plain or "|" in line.plain for line in lines[1:])


def test_spans_without_their_parent_and_errors_are_shown() -> None:
    orphan = span(schema.SPAN_PREFILL, "p", "lost", 0, 1, "prefill")
    orphan.error = "the peer is gone"
    lines = draw_waterfall(trace_pb2.Trace(spans=[orphan]), layers=True, width=80)
    assert "prefill" in lines[1].plain
    assert "the peer is gone" in lines[2].plain


def test_an_empty_trace_is_one_line() -> None:
    assert len(draw_waterfall(trace_pb2.Trace(trace_id="0"), layers=True, width=80)) == 1


def test_bytes_and_times_are_readable() -> None:
    counts = [0, 1023, 98304, 3 << 30]
    assert [format_bytes(count) for count in counts] == ["0 B", "1023 B", "96.0 KiB", "3.0 GiB"]
    times_ns = [0, 1_234_567, 2_500 * MS]
    assert [format_ms(ns) for ns in times_ns] == ["0.00 ms", "1.23 ms", "2,500 ms"]
