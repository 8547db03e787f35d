"""Traces as files for other programs: an HTML page, OTLP in JSON, and Chrome's trace events for Perfetto. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Any, Final

from opentelemetry.trace import SpanKind

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import ns_from_duration, unix_ns_from_timestamp
from headrace_common.telemetry.schema_tables import ATTRIBUTE_TYPES, SPAN_KINDS
from headrace_common.trace_view.model import UNDRAWN_STEPS, LayerWrite, Link, Step, TraceView
from headrace_common.trace_view.verdict import (
    format_bytes,
    format_gb_s,
    format_ms,
    format_percent,
    verdict,
)

_COLORS: Final = {
    "admission": "#7f56d9", "tokenize": "#9e77ed", "route": "#6172f3", "retry": "#c01048", "reserve": "#53b1fd",
    "queue": "#f79009", "batch wait": "#fdb022", "prefill": "#2e7dc1", "transfer exposed": "#d64545",
    "decode wait": "#ee46bc", "first step": "#12b76a", "network": "#0e9384", "unaccounted": "#98a2b3",
}  # fmt: skip
_SERVICES: Final = {
    "router": "#6172f3",
    "prefill": "#f79009",
    "decode": "#12b76a",
    "both": "#12b76a",
}
_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 13px/1.5 system-ui, "DejaVu Sans", sans-serif; margin: 20px; max-width: 1100px; }
h1 { font-size: 16px; } h2 { font-size: 14px; margin-top: 24px; }
.lane { display: grid; grid-template-columns: 260px 1fr 90px; gap: 8px; align-items: center; }
.lane span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.lane b { font-weight: normal; text-align: right; font-variant-numeric: tabular-nums; }
.track { position: relative; height: 12px; background: #8882; border-radius: 2px; overflow: hidden; }
.track i { position: absolute; top: 0; bottom: 0; min-width: 1px; border-radius: 2px; }
.sum { display: flex; height: 22px; margin: 10px 0; border-radius: 3px; overflow: hidden; }
table { border-collapse: collapse; } td, th { padding: 1px 14px 1px 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } .error { color: #c01048; }
details { margin: 6px 0; }
"""


def html_page(view: TraceView) -> str:
    """The page. Texts of clients are escaped."""
    end_ns = max(1, view.ttft_ns)
    state = "" if view.complete else ", incomplete"
    about = f"trace {view.trace_id}, request {view.request_id}, {view.prompt_tokens:,} prompt tokens{state}"
    body = [
        f"<h1>{escape(verdict(view))}</h1>",
        f"<p>{escape(about)}</p>",
        "<h2>Time to first token</h2>" if view.answered else "<h2>Until the end</h2>",
        *_sum(view),
        f"<h2>Steps, from 0 to {format_ms(view.ttft_ns)}</h2>",
        *(_step(step, end_ns) for step in view.steps if _is_drawn(step, end_ns)),
        "<h2>Links</h2>" if view.links else "",
        *(_lane(link, end_ns) for link in view.links),
        *(_layers(link) for link in view.links),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(view.request_id or view.trace_id)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _sum(view: TraceView) -> Iterable[str]:
    total_ns = max(1, view.ttft_ns)
    yield '<div class="sum">'
    for part in view.parts:
        color = _COLORS.get(part.name, "#98a2b3")
        width = 100 * part.duration_ns / total_ns
        title = escape(f"{part.name}: {format_ms(part.duration_ns)}")
        yield f'<i title="{title}" style="width:{width:.3f}%;background:{color}"></i>'
    yield "</div><table>"
    for part in view.parts:
        share = format_percent(part.duration_ns, total_ns)
        yield f"<tr><td>{escape(part.name)}</td><td>{format_ms(part.duration_ns)}</td><td>{share}</td></tr>"
    yield f"<tr><th>sum</th><th>{format_ms(view.ttft_ns)}</th><th></th></tr></table>"


def _is_drawn(step: Step, end_ns: int) -> bool:
    return step.name not in UNDRAWN_STEPS and (step.start_ns < end_ns or bool(step.error))


def _step(step: Step, end_ns: int) -> str:
    color = "#c01048" if step.error else _SERVICES.get(step.service, "#98a2b3")
    label = f"{step.worker or step.service} {step.label}"
    bar = _bar(step.start_ns, step.start_ns + step.duration_ns, end_ns, color)
    note = f' <span class="error">{escape(step.error)}</span>' if step.error else ""
    indent = f"padding-left:{10 * step.depth}px"
    return (
        f'<div class="lane"><span style="{indent}">{escape(label)}{note}</span><div class="track">{bar}</div>'
        f"<b>{format_ms(step.duration_ns)}</b></div>"
    )


def _lane(link: Link, end_ns: int) -> str:
    bars = "".join(_write_bar(write, end_ns) for write in link.writes)
    speed = f"{format_gb_s(link.gb_s)} GB/s" if link.moving_ns > 0 else "-"
    return f'<div class="lane"><span>{escape(link.name)}</span><div class="track">{bars}</div><b>{speed}</b></div>'


def _write_bar(write: LayerWrite, end_ns: int) -> str:
    title = f"layer {write.layer}, {format_bytes(write.payload_bytes)}, {write.cause}"
    return _bar(write.submitted_ns, write.landed_ns, end_ns, "#9e77ed99", title)


def _bar(start_ns: int, end_ns: int, scale_ns: int, color: str, title: str = "") -> str:
    left = 100 * max(0, min(start_ns, scale_ns)) / scale_ns
    width = 100 * max(0, min(end_ns, scale_ns)) / scale_ns - left
    return f'<i title="{escape(title)}" style="left:{left:.3f}%;width:{max(0.0, width):.3f}%;background:{color}"></i>'


def _layers(link: Link) -> str:
    rows = "".join(
        f"<tr><td>{write.layer}</td><td>{write.ready_ns / 1e6:.2f}</td><td>{write.submitted_ns / 1e6:.2f}</td>"
        f"<td>{f'{write.landed_ns / 1e6:.2f}' if write.finished else 'never'}</td>"
        f"<td>{format_bytes(write.payload_bytes)}</td><td>{escape(write.cause)} {format_ms(write.cause_ns)}</td></tr>"
        for write in link.writes
    )
    return (
        f"<details><summary>{escape(link.name)}: layers</summary><table><tr><th>layer</th><th>ready ms</th>"
        f"<th>submitted</th><th>landed</th><th>bytes</th><th>time went to</th></tr>{rows}</table></details>"
    )


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
    if span.parent_span_id:
        made["parentSpanId"] = span.parent_span_id
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


def perfetto_object(view: TraceView) -> dict[str, Any]:
    """Each worker is a process of the document, and each link a thread of the process "links"."""
    threads: dict[tuple[str, str], tuple[int, int]] = {}
    processes: dict[str, int] = {}
    events: list[dict[str, Any]] = []

    def thread(process: str, name: str) -> dict[str, int]:
        if process not in processes:
            processes[process] = len(processes) + 1
            events.append(_name("process_name", processes[process], 0, process))
        number = threads.get((process, name))
        if number is None:
            number = threads[process, name] = processes[process], len(threads) + 1
            events.append(_name("thread_name", *number, name))
        return {"pid": number[0], "tid": number[1]}

    for step in view.steps:
        place = thread(step.worker or step.service or "unknown", f"depth {step.depth}")
        events.append(
            {
                **place,
                **_times(step.start_ns, step.start_ns + step.duration_ns),
                "name": step.label,
                "cat": step.service,
                "args": {"error": step.error} if step.error else {},
            }
        )
    for link in view.links:
        events += [
            {
                **thread("links", link.name),
                **_times(write.submitted_ns, write.landed_ns),
                "name": f"layer {write.layer}",
                "cat": "transfer",
                "args": {
                    "bytes": write.payload_bytes,
                    "ready_us": write.ready_ns / 1e3,
                    "cause": write.cause,
                    "cause_us": write.cause_ns / 1e3,
                },
            }
            for write in link.writes
        ]
    about = {"trace_id": view.trace_id, "request_id": view.request_id}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _times(start_ns: int, end_ns: int) -> dict[str, Any]:
    return {"ph": "X", "ts": start_ns / 1e3, "dur": max(0, end_ns - start_ns) / 1e3}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
