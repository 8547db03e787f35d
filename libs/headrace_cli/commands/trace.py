"""`headrace trace` and `explain`: where the time of a request went, and what other decisions would have given."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from opentelemetry.trace import SpanKind
from rich.console import Console
from rich.text import Text

from headrace.inference.v1 import trace_pb2
from headrace_cli.client import WAIT_S, RouterClient, Wait, open_router_internally
from headrace_cli.commands.route import find_internal
from headrace_cli.options import DEFAULT_ROUTER, AddressedCommand, Registry, Router, RouterInternal
from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    command,
    fitted_table,
    message_object,
    option,
    print_json,
)
from headrace_cli.waterfall import draw_comparison, draw_layers, draw_trace
from headrace_common.durations import ns_from_duration, unix_ns_from_timestamp
from headrace_common.errors import ConfigError, NotFound
from headrace_common.limits import PAGE_SIZE_MAX
from headrace_common.telemetry import schema
from headrace_common.telemetry.schema_tables import ATTRIBUTE_TYPES, SPAN_KINDS
from headrace_common.trace_view.conversation import Turn, turns_of
from headrace_common.trace_view.reading import read_trace
from headrace_common.trace_view.regret import regrets_of
from headrace_common.trace_view.verdict import format_ms, verdict

PIPED_WIDTH: Final = 80
COMPARE: Final = "compare"
CONVERSATION: Final = "conversation"
LAST: Final = "last"
SLOWEST: Final = "slowest"
FAILED: Final = "failed"
_TRACE_TITLES: Final = "started (UTC),request,status,model,TTFT,prompt,answer,verdict"
_TURN_TITLES: Final = "request,prompt,cached,sent,computed,answer,kept,workers,why"
_REGRET_TITLES: Final = "best other decision,requests,earlier,sum,most,request"
SEARCHED_MAX: Final = 256
"""Traces, newest first, among which the slowest or the last failed one is searched."""


class TraceOrder(StrEnum):
    """What a list is sorted by."""

    TIME = "time"
    TTFT = "ttft"
    PROMPT = "prompt"
    ANSWER = "answer"


@command(
    "trace",
    "headrace trace   |   headrace trace slowest   |   headrace trace my-request --layers   |   "
    "headrace trace compare my-request other-request   |   headrace trace failed --otlp trace.json",
    cls=AddressedCommand,
)
async def trace(  # noqa: PLR0913, PLR0917 - every option is one of the user's
    which: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WHICH]...",
            help=f"{LAST} (default), {SLOWEST}, {FAILED}, the id of a trace, request or response, {COMPARE} A B, "
            f"or {CONVERSATION} ID: its turns.",
        ),
    ] = None,
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    internal: RouterInternal = "",
    layers: Annotated[
        bool, option("Also list every layer of every link.", "--layers/--no-layers")
    ] = False,
    otlp: Annotated[Path | None, option("Write it as OTLP JSON.", metavar="FILE")] = None,
    list_count: Annotated[
        int, option("List the newest N instead.", "--list", metavar="N", min=0, max=PAGE_SIZE_MAX)
    ] = 0,
    sort: Annotated[
        TraceOrder, option("Order of the list, the largest first.", "--sort")
    ] = TraceOrder.TIME,
    spans_wait: Annotated[
        float, option("Time that the last spans have to arrive.", metavar="SECONDS", min=0)
    ] = 2.0,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Shows where the time of one request went: the sum, its largest part, and the steps of all processes."""

    names = chosen_names(which or [LAST])
    if otlp is not None and (list_count or len(names) > 1):
        raise ConfigError("--otlp writes one trace: name one, and leave --list out")
    found = await find_internal(internal, registry, router)
    async with open_router_internally(found) as client:
        if list_count:
            listed = newest_traces(client, list_count)
            show_list([one async for one in listed], sort, as_json=as_json)
        elif names[0] == CONVERSATION and len(names) > 1:
            show_turns(await conversation_turns(client, names[1]), as_json=as_json)
        elif len(names) > 1:
            both = [await chosen_trace(client, name, spans_wait) for name in names]
            show_comparison(both, as_json=as_json)
        else:
            shown = await chosen_trace(client, names[0], spans_wait)
            if otlp is not None:
                write_otlp(shown, otlp)
            if as_json:
                print_json(trace_object(shown))
            else:
                show_trace(shown, answer_console(), layers=layers)


@command("explain", "headrace explain   |   headrace explain --json", cls=AddressedCommand)
async def explain(
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    internal: RouterInternal = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Shows how much earlier first tokens would have come with the best other decisions, by kind."""

    found = await find_internal(internal, registry, router)
    async with open_router_internally(found) as client:
        regrets = regrets_of([trace async for trace in newest_traces(client)])
    if as_json:
        print_json({"regrets": list(map(asdict, regrets))})
        return
    rows = [
        [
            *(one.other, str(one.request_count), str(one.better_count)),
            *(f"{one.sum_ms:,.0f} ms", f"{one.worst_ms:,.0f} ms", one.worst_request_id),
        ]
        for one in regrets
    ]
    _print_table(_REGRET_TITLES, rows)


def chosen_names(words: list[str]) -> list[str]:
    """One trace, two to compare, or CONVERSATION and its id. Raises ConfigError."""
    if len(words) == {COMPARE: 3, CONVERSATION: 2}.get(words[0], 1):
        return words[1:] if words[0] == COMPARE else words
    raise ConfigError(
        f"name one trace, two after {COMPARE}, or an id after {CONVERSATION}, as in "
        f"`headrace trace {COMPARE} {LAST} {SLOWEST}`"
    )


def show_comparison(traces: Sequence[trace_pb2.Trace], *, as_json: bool) -> None:
    """Prints the differences of two traces. For programs, both traces."""
    if as_json:
        print_json({"traces": list(map(trace_object, traces))})
        return
    first, second = map(read_trace, traces)
    console = answer_console()
    _print(console, draw_comparison(first, second, width=_width(console)))


async def chosen_trace(client: RouterClient, name: str, wait_s: float) -> trace_pb2.Trace:
    """The trace with an id, or the last, the slowest, or the last failed one. Raises NotFound."""
    if name not in (SLOWEST, FAILED):
        return await client.trace("" if name == LAST else name, wait_s)
    best: trace_pb2.Trace | None = None
    longest_ns = -1
    async for trace in newest_traces(client):
        view = read_trace(trace)
        if name == FAILED and (view.error or any(step.error for step in view.steps)):
            return trace
        if name == SLOWEST and view.answered and view.ttft_ns > longest_ns:
            best, longest_ns = trace, view.ttft_ns
    if best is None:
        what = "failed" if name == FAILED else "has a first token"
        raise NotFound(f"none of the stored requests {what}", metadata={"id": name})
    return best


async def newest_traces(
    client: RouterClient, count: int = SEARCHED_MAX
) -> AsyncIterator[trace_pb2.Trace]:
    """The newest ones, newest first."""
    for summary in await client.traces(count):
        # The router may have dropped it meanwhile.
        with suppress(NotFound):
            yield await client.trace(summary.trace_id, 0.0)


async def conversation_turns(client: RouterClient, conversation_id: str) -> list[Turn]:
    """The turns of a conversation that are stored, oldest first. Raises NotFound."""
    turns = turns_of([trace async for trace in newest_traces(client)], conversation_id)
    if not turns:
        raise NotFound(
            f"none of the last {SEARCHED_MAX} requests belongs to conversation {conversation_id}",
            metadata={"id": conversation_id},
        )
    return turns


def show_turns(turns: Iterable[Turn], *, as_json: bool) -> None:
    """Prints one row for each turn."""
    if as_json:
        print_json({"turns": list(map(asdict, turns))})
        return
    rows: list[list[str]] = []
    for turn in turns:
        counts = [turn.prompt_tokens, turn.cached_tokens, turn.transferred_tokens]
        counts += [turn.computed_tokens, turn.answer_tokens, turn.kept_tokens]
        workers = " > ".join(filter(None, (turn.prefill_worker, turn.decode_worker)))
        rows.append([turn.request_id, *map(str, counts), workers, turn.reason])
    _print_table(_TURN_TITLES, rows)


def show_trace(trace: trace_pb2.Trace, console: Console, *, layers: bool) -> None:
    """Prints the sum and the waterfall, and with `layers` every write."""
    view = read_trace(trace)
    width = _width(console)
    lines = draw_trace(view, width=width)
    if layers:
        lines += draw_layers(view, width=width)
    _print(console, lines)


def write_otlp(trace: trace_pb2.Trace, path: Path) -> None:
    """Writes the trace as OTLP in JSON. Raises ConfigError."""
    text = json.dumps(otlp_object(trace), indent=1) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--otlp {path} cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from error


def show_list(traces: Iterable[trace_pb2.Trace], order: TraceOrder, *, as_json: bool) -> None:
    """Prints one row for each trace."""
    listed = list(map(listed_trace, traces))
    names = {"ttft": "ttft_ns", "prompt": "prompt_tokens", "answer": "completion_tokens"}
    if order in names:
        listed.sort(key=lambda one: one[names[order]] or 0, reverse=True)
    if as_json:
        print_json({"traces": listed})
        return
    rows = [
        [
            # The time of day, to the millisecond.
            f"{one['start_time'][11:]:.12}",
            *(one[name] for name in ("request_id", "status", "model")),
            "-" if one["ttft_ns"] is None else format_ms(one["ttft_ns"]),
            *map(str, (one["prompt_tokens"], one["completion_tokens"])),
            one["verdict"],
        ]
        for one in listed
    ]
    _print_table(_TRACE_TITLES, rows)


def _print_table(titles: str, rows: Sequence[Sequence[str]]) -> None:
    console = answer_console()
    console.print(fitted_table(console, [*map(Column, titles.split(","))], rows)[0])


def listed_trace(trace: trace_pb2.Trace) -> dict[str, Any]:
    """What the list has of a trace. The status is "ok", "running", or the reason of the error."""
    view = read_trace(trace)
    roots = [span for span in trace.spans if span.name == schema.SPAN_REQUEST]
    attributes = roots[-1].attributes if roots else {}
    failure = attributes.get(schema.ATTRIBUTE_ERROR_REASON, "failed") if view.error else "ok"
    document = message_object(trace)
    del document["spans"]
    return document | {
        "status": failure if roots else "running",
        "model": attributes.get(schema.ATTRIBUTE_GEN_AI_REQUEST_MODEL, ""),
        "ttft_ns": view.ttft_ns if view.answered else None,
        "prompt_tokens": view.prompt_tokens,
        "completion_tokens": view.completion_tokens,
        "verdict": verdict(view),
    }


def trace_object(trace: trace_pb2.Trace) -> dict[str, Any]:
    """A trace for programs: its message, and what the drawing shows of it."""
    view = read_trace(trace)
    return message_object(trace) | {
        "verdict": verdict(view),
        "ttft_ns": view.ttft_ns if view.answered else None,
        "best_other_decision": view.other,
        "parts": [{"name": name, "duration_ns": part_ns} for name, part_ns in view.parts.items()],
        "links": [
            {
                "name": link.name,
                "transport": link.transport,
                "payload_bytes": link.payload_bytes,
                "moving_ns": link.moving_ns,
                "end_ns": link.end_ns,
                "writes": len(link.writes),
            }
            for link in view.links
        ],
    }


def _width(console: Console) -> int:
    return console.width if console.is_terminal else PIPED_WIDTH


def _print(console: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


_ERROR: Final = 2
_SEPARATOR: Final = ", "


def otlp_object(trace: trace_pb2.Trace) -> dict[str, Any]:
    """An ExportTraceServiceRequest. Ids are hex and 64-bit numbers are texts, as OTLP's JSON has them."""
    by_process: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for span in trace.spans:
        by_process.setdefault((span.service, span.worker_id), []).append(_span(trace, span))
    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [
                        _attribute("service.name", f"headrace-{service}"),
                        *([_attribute("service.instance.id", worker)] if worker else []),
                    ]
                },
                "scopeSpans": [{"scope": {"name": "headrace"}, "spans": spans}],
            }
            for (service, worker), spans in by_process.items()
        ]
    }


def _span(trace: trace_pb2.Trace, span: trace_pb2.Span) -> dict[str, Any]:
    start_ns = unix_ns_from_timestamp(span.start_time)
    made: dict[str, Any] = {
        "traceId": trace.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        # OTLP's numbers begin with "unspecified".
        "kind": SPAN_KINDS.get(span.name, SpanKind.INTERNAL).value + 1,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + ns_from_duration(span.duration)),
        "attributes": [_attribute(key, value) for key, value in sorted(span.attributes.items())],
    }
    known = {"parentSpanId": span.parent_span_id, "traceState": span.trace_state}
    made |= {name: text for name, text in known.items() if text}
    if span.linked_span_ids:
        made["links"] = [
            {"traceId": trace.trace_id, "spanId": linked} for linked in span.linked_span_ids
        ]
    if span.error:
        made["status"] = {"code": _ERROR, "message": span.error}
    return made


def _attribute(key: str, text: str) -> dict[str, Any]:
    return {"key": key, "value": _value(ATTRIBUTE_TYPES.get(key, "string"), text)}


def _value(kind: str, text: str) -> dict[str, Any]:
    """An attribute's value from its text in a trace. A text that does not fit the type stays one."""
    if kind.endswith("[]"):
        item = kind.removesuffix("[]")
        parts = text.split(_SEPARATOR) if text else []
        return {"arrayValue": {"values": [_value(item, part) for part in parts]}}
    try:
        match kind:
            case "int":
                return {"intValue": str(int(text))}
            case "double" if math.isfinite(float(text)):
                return {"doubleValue": float(text)}
    except ValueError:
        return {"stringValue": text}
    if kind == "bool" and text in ("true", "false"):
        return {"boolValue": text == "true"}
    return {"stringValue": text}
