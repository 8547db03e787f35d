"""`headrace trace`: the time of one request, over all processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from headrace.inference.v1 import trace_pb2
from headrace_cli.client import open_router_internally
from headrace_cli.console import answer_console, can_draw_blocks
from headrace_cli.contexts.choice import AddressedCommand
from headrace_cli.exit_status import run_command
from headrace_cli.internal_router import find_internal
from headrace_cli.json_output import Json, print_record
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router, RouterInternal
from headrace_cli.records import SpanRecord, TraceRecord, TracesRecord, TraceSummaryRecord
from headrace_cli.waterfall.draw import draw_waterfall
from headrace_cli.waterfall.rows import layers_of, link_spans
from headrace_cli.waterfall.units import format_bytes, format_ms
from headrace_common.durations import ns_from_duration, unix_ns_from_timestamp
from headrace_common.limits import PAGE_SIZE_MAX
from headrace_common.telemetry import schema

PIPED_WIDTH = 100
PAIRS_NAMED = 4


def register(app: typer.Typer) -> None:
    """Adds `headrace trace`."""
    app.command(
        cls=AddressedCommand,
        epilog="Examples:  headrace trace   |   headrace trace my-request --no-layers   |   "
        "headrace trace --list 10",
    )(trace)


def trace(
    id: Annotated[  # noqa: A002, the name that the help shows
        str, typer.Argument(metavar="[ID]", help="Trace id or request id; empty means the newest.")
    ] = "",
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    internal: RouterInternal = "",
    layers: Annotated[
        bool, typer.Option("--layers/--no-layers", help="One line per layer, or one for all.")
    ] = True,
    list_count: Annotated[
        int,
        typer.Option(
            "--list", metavar="N", min=0, max=PAGE_SIZE_MAX, help="List the newest N instead."
        ),
    ] = 0,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the last spans.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Draws where one request's time went, over all processes."""

    async def work() -> None:
        console = answer_console()
        found = await find_internal(internal, registry, router)
        async with open_router_internally(found) as client:
            if list_count and as_json:
                print_record(traces_record(await client.traces(list_count)))
            elif list_count:
                console.print(traces_table(await client.traces(list_count)))
            elif as_json:
                print_record(trace_record(await client.trace(id, wait)))
            else:
                show_trace(await client.trace(id, wait), console, layers=layers)

    run_command(work())


def trace_record(trace: trace_pb2.Trace) -> TraceRecord:
    """A trace for programs."""
    return TraceRecord(
        trace_id=trace.trace_id,
        request_id=trace.request_id,
        start_unix_ns=unix_ns_from_timestamp(trace.start_time),
        complete=trace.complete,
        spans=[
            SpanRecord(
                span_id=span.span_id,
                parent_span_id=span.parent_span_id or None,
                name=span.name,
                service=span.service,
                worker=span.worker_id or None,
                start_unix_ns=unix_ns_from_timestamp(span.start_time),
                duration_ns=ns_from_duration(span.duration),
                attributes=dict(span.attributes),
            )
            for span in trace.spans
        ],
    )


def traces_record(traces: Iterable[trace_pb2.Trace]) -> TracesRecord:
    """Traces without their spans, for programs."""
    return TracesRecord(
        [
            TraceSummaryRecord(
                trace.trace_id,
                trace.request_id,
                unix_ns_from_timestamp(trace.start_time),
                trace.complete,
            )
            for trace in traces
        ]
    )


def show_trace(trace: trace_pb2.Trace, console: Console, *, layers: bool) -> None:
    """Prints the waterfall, then the summary of the transfer."""
    width = console.width if console.is_terminal else PIPED_WIDTH
    for line in draw_waterfall(
        trace, layers=layers, width=width, ascii_only=not can_draw_blocks(console)
    ):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    summary = transfer_text(trace)
    if summary:
        console.print(summary)


def transfer_text(trace: trace_pb2.Trace) -> str:
    """Size, times and ways of the transfer, in up to two lines. Empty without a transfer."""
    sent = link_spans(trace)
    if not sent:
        return ""
    layer_count = len({write.layer for span in sent for write in layers_of(span)})
    size = format_bytes(_sum(sent, schema.ATTRIBUTE_PAYLOAD_BYTES))
    text = f"{layer_count} layers in {_sum(sent, schema.ATTRIBUTE_WRITES)} writes, {size}"
    tasks = [span for span in trace.spans if schema.ATTRIBUTE_TRANSFER_MS in span.attributes]
    if tasks:
        whole, exposed = (
            format_ms(int(float(tasks[-1].attributes.get(name, "0")) * 1e6))
            for name in (schema.ATTRIBUTE_TRANSFER_MS, schema.ATTRIBUTE_EXPOSED_MS)
        )
        text += f", {whole} from the first layer to the last write, {exposed} of it after the last layer"
    ways = ways_text(sent)
    if not ways:
        return text
    runs, entries = _sum(sent, schema.ATTRIBUTE_RUNS), _sum(sent, schema.ATTRIBUTE_ENTRIES)
    text += f"\n{ways}; {runs:,} runs in {entries:,} entries"
    control = _sum(trace.spans, schema.ATTRIBUTE_CONTROL_BYTES)
    return text + (f", {format_bytes(control)} of control messages" if control else "")


def ways_text(sent: Sequence[trace_pb2.Span]) -> str:
    """Transport and strategy, by rank pair when these differ. Empty when unknown."""
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


def _sum(spans: Iterable[trace_pb2.Span], attribute: str) -> int:
    return sum(int(span.attributes.get(attribute, "0")) for span in spans)


def _pairs_text(pairs: set[tuple[int, int]]) -> str:
    named = [f"{source}>{destination}" for source, destination in sorted(pairs)[:PAIRS_NAMED]]
    more = len(pairs) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def traces_table(traces: Iterable[trace_pb2.Trace]) -> Table:
    """One row for each trace."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("started (UTC)", "trace", "request", "complete"):
        table.add_column(title, overflow="fold")
    for trace in traces:
        started = trace.start_time.ToDatetime().strftime("%H:%M:%S.%f")[:-3]
        table.add_row(started, trace.trace_id, trace.request_id, "yes" if trace.complete else "no")
    return table
