"""`headrace trace`: where one request's time went."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.inference.v1 import trace_pb2
from headrace_cli.client import RouterClient
from headrace_cli.console import can_draw_blocks
from headrace_cli.waterfall import draw_waterfall, format_bytes, format_ms, layer_spans
from headrace_common import telemetry_schema as schema

PIPED_WIDTH = 100


def show_trace(trace: trace_pb2.Trace, console: Console, *, layers: bool) -> None:
    """The waterfall, and under it what moved."""
    width = console.width if console.is_terminal else PIPED_WIDTH
    for line in draw_waterfall(
        trace, layers=layers, width=width, ascii_only=not can_draw_blocks(console)
    ):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    moved = transfer_text(trace)
    if moved:
        console.print(moved)


def transfer_text(trace: trace_pb2.Trace) -> str:
    """What the transfer came to, in one line; empty without one."""
    sent = layer_spans(trace)
    if not sent:
        return ""
    size = sum(int(span.attributes.get(schema.ATTRIBUTE_PAYLOAD_BYTES, "0")) for span in sent)
    layer_count = len({span.attributes.get(schema.ATTRIBUTE_LAYER, "") for span in sent})
    busy_ns = sum(span.duration.ToNanoseconds() for span in sent)
    text = (
        f"{layer_count} layers in {len(sent)} writes, {format_bytes(size)}, "
        f"{format_ms(busy_ns)} of writing"
    )
    exposed = [
        span.attributes[schema.ATTRIBUTE_EXPOSED_MS]
        for span in trace.spans
        if schema.ATTRIBUTE_EXPOSED_MS in span.attributes
    ]
    if exposed:
        text += (
            f", {format_ms(int(float(exposed[-1]) * 1e6))} of it after the last layer was computed"
        )
    return text


async def traces_table(router: RouterClient, count: int) -> Table:
    """The newest traces, one row each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("started (UTC)", "trace", "request", "complete"):
        table.add_column(title, no_wrap=True)
    for trace in await router.traces(count):
        started = trace.start_time.ToDatetime().strftime("%H:%M:%S.%f")[:-3]
        table.add_row(started, trace.trace_id, trace.request_id, "yes" if trace.complete else "no")
    return table
