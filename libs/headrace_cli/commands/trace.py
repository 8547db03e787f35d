"""`headrace trace`: where one request's time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.inference.v1 import trace_pb2
from headrace_cli.client import RouterClient
from headrace_cli.console import can_draw_blocks
from headrace_cli.waterfall.waterfall import draw_waterfall, format_bytes, format_ms, layer_spans
from headrace_common.telemetry import schema

PIPED_WIDTH = 100
PAIRS_NAMED = 4


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
    """What the transfer came to and how it went, in two lines; empty without one."""
    sent = layer_spans(trace)
    if not sent:
        return ""
    layer_count = len({span.attributes.get(schema.ATTRIBUTE_LAYER, "") for span in sent})
    size = format_bytes(_sum(sent, schema.ATTRIBUTE_PAYLOAD_BYTES))
    text = (
        f"{layer_count} layers in {len(sent)} writes, {size}, {format_ms(busy_ns(sent))} of writing"
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
    ways = ways_text(sent)
    if not ways:
        return text
    runs, entries = _sum(sent, schema.ATTRIBUTE_RUNS), _sum(sent, schema.ATTRIBUTE_ENTRIES)
    text += f"\n{ways}; {runs:,} runs in {entries:,} entries"
    control = _sum(trace.spans, schema.ATTRIBUTE_CONTROL_BYTES)
    return text + (f", {format_bytes(control)} of control messages" if control else "")


def ways_text(sent: Sequence[trace_pb2.Span]) -> str:
    """Transport and strategy; with the rank pairs when they went different ways; empty when unknown."""
    pairs: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for span in sent:
        attributes = span.attributes
        transport = attributes.get(schema.ATTRIBUTE_TRANSPORT, "")
        if transport:
            source = int(attributes.get(schema.ATTRIBUTE_SOURCE_RANK, "0"))
            destination = int(attributes.get(schema.ATTRIBUTE_DESTINATION_RANK, "0"))
            way = f"{transport}, {attributes.get(schema.ATTRIBUTE_STRATEGY, '')}".removesuffix(", ")
            pairs[way].add((source, destination))
    if len(pairs) == 1:
        return f"by {next(iter(pairs))}"
    return "; ".join(f"{_pairs_text(found)} by {way}" for way, found in sorted(pairs.items()))


def busy_ns(spans: Sequence[trace_pb2.Span]) -> int:
    """Nanoseconds in which at least one of the spans ran, by rank: writes of one rank overlap."""
    by_rank: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in spans:
        start_ns = span.start_time.ToNanoseconds()
        rank = span.attributes.get(schema.ATTRIBUTE_SOURCE_RANK, "0")
        by_rank[rank].append((start_ns, start_ns + span.duration.ToNanoseconds()))
    busy = 0
    for times in by_rank.values():
        reached_ns = 0
        for start_ns, end_ns in sorted(times):
            busy += max(0, end_ns - max(start_ns, reached_ns))
            reached_ns = max(reached_ns, end_ns)
    return busy


def _sum(spans: Iterable[trace_pb2.Span], attribute: str) -> int:
    return sum(int(span.attributes.get(attribute, "0")) for span in spans)


def _pairs_text(pairs: set[tuple[int, int]]) -> str:
    named = [f"{source}>{destination}" for source, destination in sorted(pairs)[:PAIRS_NAMED]]
    more = len(pairs) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


async def traces_table(router: RouterClient, count: int) -> Table:
    """The newest traces, one row each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("started (UTC)", "trace", "request", "complete"):
        table.add_column(title, no_wrap=True)
    for trace in await router.traces(count):
        started = trace.start_time.ToDatetime().strftime("%H:%M:%S.%f")[:-3]
        table.add_row(started, trace.trace_id, trace.request_id, "yes" if trace.complete else "no")
    return table
