"""Reads a stored trace into a TraceView. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import ns_from_duration, unix_ns_from_timestamp
from headrace_common.telemetry import schema
from headrace_common.trace_view.model import LayerWrite, Link, Step, TraceView
from headrace_common.trace_view.parts import parts_of

_NS_PER_MS = 1e6
_SERVICE_PREFIX = "headrace-"
_LinkKey: TypeAlias = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A span with its times since the request's arrival."""

    span: trace_pb2.Span
    start_ns: int
    end_ns: int

    def text(self, attribute: str, default: str = "") -> str:
        return self.span.attributes.get(attribute, default)

    def number(self, attribute: str) -> int:
        """An attribute as an integer; 0 where it is missing or no number."""
        text = self.span.attributes.get(attribute, "")
        return int(text) if text.lstrip("-").isdecimal() else 0


def read_trace(trace: trace_pb2.Trace) -> TraceView:
    """What the trace says. Spans that have not arrived leave their part unaccounted."""
    origin_ns = _origin_ns(trace)
    spans = [_timed(span, origin_ns) for span in trace.spans]
    named: dict[str, list[TimedSpan]] = defaultdict(list)
    for one in spans:
        named[one.span.name].append(one)
    root = next(iter(named[schema.SPAN_REQUEST]), None)
    first = next(iter(named[schema.SPAN_FIRST_TOKEN]), None)
    ttft_ns = first.end_ns if first is not None else 0
    return TraceView(
        trace_id=trace.trace_id,
        request_id=trace.request_id,
        start_unix_ns=origin_ns,
        complete=trace.complete,
        ttft_ns=ttft_ns,
        total_ns=root.end_ns if root else max((one.end_ns for one in spans), default=0),
        parts=parts_of(named, ttft_ns),
        links=_links(spans, named[schema.SPAN_ATTEMPT]),
        steps=_steps(spans),
        first_token_by=_first_text(spans, schema.ATTRIBUTE_FIRST_TOKEN),
        prompt_tokens=root.number(schema.ATTRIBUTE_PROMPT_TOKENS) if root else 0,
        completion_tokens=root.number(schema.ATTRIBUTE_COMPLETION_TOKENS) if root else 0,
        error=root.span.error if root else "",
    )


def _origin_ns(trace: trace_pb2.Trace) -> int:
    """The arrival of the request: the root's start, or the first start while the root is missing."""
    starts = [unix_ns_from_timestamp(span.start_time) for span in trace.spans]
    roots = [
        start
        for span, start in zip(trace.spans, starts, strict=True)
        if span.name == schema.SPAN_REQUEST
    ]
    return min(roots or starts, default=unix_ns_from_timestamp(trace.start_time))


def _timed(span: trace_pb2.Span, origin_ns: int) -> TimedSpan:
    start_ns = unix_ns_from_timestamp(span.start_time) - origin_ns
    return TimedSpan(span, start_ns, start_ns + ns_from_duration(span.duration))


def _first_text(spans: Iterable[TimedSpan], attribute: str) -> str:
    return next((one.text(attribute) for one in spans if one.text(attribute)), "")


def _links(spans: Sequence[TimedSpan], attempts: Sequence[TimedSpan]) -> tuple[Link, ...]:
    """The links of all attempts, by name."""
    by_id = {one.span.span_id: one for one in spans}
    found: dict[_LinkKey, list[TimedSpan]] = defaultdict(list)
    for one in spans:
        if one.span.name == schema.SPAN_TRANSFER_LAYER:
            key = (
                one.span.worker_id,
                one.text(schema.ATTRIBUTE_SOURCE_RANK, "0"),
                _decode_worker(one, by_id) or _last_decode_worker(attempts),
                one.text(schema.ATTRIBUTE_DESTINATION_RANK, "0"),
            )
            found[key].append(one)
    links = [_link(destination, sent) for (_, _, destination, _), sent in found.items()]
    return tuple(sorted(links, key=lambda link: link.name))


def _decode_worker(one: TimedSpan, by_id: dict[str, TimedSpan]) -> str:
    """The decode worker of the attempt that a span belongs to. Empty when that span is missing."""
    seen: set[str] = set()
    while one.span.parent_span_id in by_id and one.span.span_id not in seen:
        seen.add(one.span.span_id)
        one = by_id[one.span.parent_span_id]
        if one.span.name == schema.SPAN_ATTEMPT:
            return one.text(schema.ATTRIBUTE_DECODE_WORKER_ID)
    return ""


def _last_decode_worker(attempts: Sequence[TimedSpan]) -> str:
    return attempts[-1].text(schema.ATTRIBUTE_DECODE_WORKER_ID) if attempts else ""


def _link(destination: str, sent: Sequence[TimedSpan]) -> Link:
    writes = [
        LayerWrite(
            layer=one.number(schema.ATTRIBUTE_LAYER),
            ready_ns=one.start_ns - _wait_ns(one),
            submitted_ns=one.start_ns,
            landed_ns=one.end_ns,
            payload_bytes=one.number(schema.ATTRIBUTE_PAYLOAD_BYTES),
        )
        for one in sent
    ]
    return Link(
        source=sent[0].span.worker_id,
        source_rank=sent[0].number(schema.ATTRIBUTE_SOURCE_RANK),
        destination=destination or "decode",
        destination_rank=sent[0].number(schema.ATTRIBUTE_DESTINATION_RANK),
        transport=_joined(sent, schema.ATTRIBUTE_TRANSPORT),
        strategy=_joined(sent, schema.ATTRIBUTE_STRATEGY),
        runs=sum(one.number(schema.ATTRIBUTE_RUNS) for one in sent),
        entries=sum(one.number(schema.ATTRIBUTE_ENTRIES) for one in sent),
        writes=tuple(sorted(writes, key=lambda write: (write.submitted_ns, write.layer))),
    )


def _wait_ns(one: TimedSpan) -> int:
    try:
        return max(0, round(float(one.text(schema.ATTRIBUTE_SEND_WAIT_MS, "0")) * _NS_PER_MS))
    except ValueError:
        return 0


def _joined(sent: Iterable[TimedSpan], attribute: str) -> str:
    return "+".join(sorted({one.text(attribute) for one in sent} - {""}))


def _steps(spans: Sequence[TimedSpan]) -> tuple[Step, ...]:
    """The spans as a tree, depth first, by start. Writes of layers are in the links."""
    shown = [one for one in spans if one.span.name != schema.SPAN_TRANSFER_LAYER]
    known = {one.span.span_id for one in shown}
    children: dict[str, list[TimedSpan]] = defaultdict(list)
    for one in shown:
        parent = one.span.parent_span_id
        own = parent == one.span.span_id
        children[parent if parent in known and not own else ""].append(one)
    steps: list[Step] = []
    pending = [(one, 0) for one in sorted(children[""], key=_order, reverse=True)]
    while pending:
        one, depth = pending.pop()
        steps.append(_step(one, depth))
        below = sorted(children.pop(one.span.span_id, ()), key=_order, reverse=True)
        pending += [(child, depth + 1) for child in below]
    return tuple(steps)


def _order(one: TimedSpan) -> tuple[int, int]:
    return one.start_ns, -one.end_ns


def _step(one: TimedSpan, depth: int) -> Step:
    span = one.span
    label = span.name.removeprefix("headrace.")
    if span.name == schema.SPAN_ATTEMPT:
        label = f"{label} {one.text(schema.ATTRIBUTE_ATTEMPT)}".rstrip()
    return Step(
        depth=depth,
        name=span.name,
        label=label,
        service=span.service.removeprefix(_SERVICE_PREFIX),
        worker=span.worker_id,
        start_ns=one.start_ns,
        duration_ns=one.end_ns - one.start_ns,
        error=span.error,
    )
