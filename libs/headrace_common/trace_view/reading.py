"""Reads a stored trace and its links into a TraceView. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.inference.v1 import latency_pb2, trace_pb2
from headrace_common.durations import ns_from_duration, unix_ns_from_timestamp
from headrace_common.latency.parts import TimePart, sum_from_proto
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import PART_ATTRIBUTES
from headrace_common.telemetry.layer_stamps import unpack_writes
from headrace_common.trace_view.model import (
    Link,
    TokenGap,
    TraceStep,
    TraceView,
)
from headrace_common.trace_view.regret import regret_text

_NS_PER_MS: Final = 1e6
_TIERS: Final = {
    schema.ATTRIBUTE_HOST_TOKENS: "tokens from main memory",
    schema.ATTRIBUTE_DISK_TOKENS: "tokens from disk",
    schema.ATTRIBUTE_REMOTE_TOKENS: "tokens from the remote pool",
}


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A span with its times since the request's arrival."""

    span: trace_pb2.Span
    start_ns: int
    end_ns: int

    def text(self, attribute: str, default: str = "") -> str:
        """An attribute, or `default` where it is missing."""
        return self.span.attributes.get(attribute, default)

    def number(self, attribute: str) -> int:
        """An attribute as an integer; 0 where it is missing or no number."""
        return whole_number(self.text(attribute)) or 0

    def real(self, attribute: str) -> float:
        """An attribute as a number; 0 where it is missing or none."""
        try:
            return float(self.text(attribute, "0"))
        except ValueError:
            return 0.0


def read_links(spans: Sequence[TimedSpan]) -> tuple[Link, ...]:
    """The links of all attempts, by name."""
    by_id = {one.span.span_id: one for one in spans}
    links = [_link(one, by_id) for one in spans if one.span.name == schema.SPAN_TRANSFER_LINK]
    return tuple(sorted(links, key=lambda link: (link.name, link.start_ns)))


def _link(one: TimedSpan, by_id: Mapping[str, TimedSpan]) -> Link:
    writes = unpack_writes(one.text(schema.ATTRIBUTE_LINK_LAYERS), one.start_ns)
    return Link(
        source=one.span.worker_id,
        source_rank=one.number(schema.ATTRIBUTE_SOURCE_RANK),
        destination=_decode_worker(one, by_id),
        destination_rank=one.number(schema.ATTRIBUTE_DESTINATION_RANK),
        transport=one.text(schema.ATTRIBUTE_TRANSPORT),
        strategy=one.text(schema.ATTRIBUTE_STRATEGY),
        payload_bytes=one.number(schema.ATTRIBUTE_PAYLOAD_BYTES),
        moving_ns=round(one.real(schema.ATTRIBUTE_MOVING_MS) * _NS_PER_MS),
        runs=one.number(schema.ATTRIBUTE_RUNS),
        entries=one.number(schema.ATTRIBUTE_ENTRIES),
        expected_ns=round(one.real(schema.ATTRIBUTE_EXPECTED_MS) * _NS_PER_MS),
        bandwidth_share=one.real(schema.ATTRIBUTE_BANDWIDTH_SHARE),
        error=one.span.error,
        writes=tuple(sorted(writes, key=lambda write: (write.submitted_ns, write.layer))),
    )


def _decode_worker(one: TimedSpan, by_id: Mapping[str, TimedSpan]) -> str:
    """The decode worker that a span, or a span around it, names."""
    seen: set[str] = set()
    while one.span.span_id not in seen:
        name = one.text(schema.ATTRIBUTE_DECODE_WORKER_ID)
        if name:
            return name
        seen.add(one.span.span_id)
        one = by_id.get(one.span.parent_span_id, one)
    return "decode"


_NS_PER_US = 1_000
_SERVICE_PREFIX = "headrace-"


def read_trace(trace: trace_pb2.Trace) -> TraceView:
    """What the trace says. It has no parts before the request has ended."""
    origin_ns = _origin_ns(trace)
    spans = [_timed(span, origin_ns) for span in trace.spans]
    named: dict[str, list[TimedSpan]] = defaultdict(list)
    for one in spans:
        named[one.span.name].append(one)
    root = next(iter(named[schema.SPAN_REQUEST]), None)
    first = next(iter(named[schema.SPAN_FIRST_TOKEN]), None)
    second = next(iter(named[schema.SPAN_SECOND_TOKEN]), None)
    total_ns = root.end_ns if root else max((one.end_ns for one in spans), default=0)
    parts = _parts(root.span.attributes) if root else {}
    return TraceView(
        trace_id=trace.trace_id,
        request_id=trace.request_id,
        start_unix_ns=origin_ns,
        complete=trace.complete,
        ttft_ns=sum(parts.values()),
        total_ns=total_ns,
        parts=parts,
        links=read_links(spans),
        steps=_steps(spans),
        answered=first is not None,
        second_parts=_parts(second.span.attributes) if second else {},
        hidden_ns=_NS_PER_US * root.number(schema.ATTRIBUTE_TRANSFER_HIDDEN_US) if root else 0,
        clock_error_ns=round(root.real(schema.ATTRIBUTE_CLOCK_ERROR_MS) * 1e6) if root else 0,
        prompt_tokens=root.number(schema.ATTRIBUTE_PROMPT_TOKENS) if root else 0,
        completion_tokens=root.number(schema.ATTRIBUTE_COMPLETION_TOKENS) if root else 0,
        error=root.span.error if root else "",
        other=regret_text(root.span.attributes) if root else "",
        usual=_usual(trace.usual.first_token),
        second_usual=_usual(trace.usual.second_token),
        gaps=tuple(
            TokenGap(one.start_ns, one.end_ns - one.start_ns, one.text(schema.ATTRIBUTE_GAP_CAUSE))
            for one in named[schema.SPAN_GAP]
        ),
        error_reason=root.text(schema.ATTRIBUTE_ERROR_REASON) if root else "",
    )


_WHOLE: Final = re.compile(r"-?[0-9]{1,18}")


def whole_number(text: str) -> int | None:
    """The number that an attribute of a peer's span has as text; None for another text."""
    return int(text) if _WHOLE.fullmatch(text) else None


def _usual(message: latency_pb2.LatencySum) -> dict[str, int]:
    return {_name(part): _NS_PER_US * us for part, us in sum_from_proto(message).parts_us.items()}


def _name(part: TimePart) -> str:
    return part.label.replace("_", " ")


def _parts(attributes: Mapping[str, str]) -> dict[str, int]:
    """The nanoseconds of each part in the attributes of a span, in the order of a request."""
    times = ((part, attributes.get(name, "")) for part, name in PART_ATTRIBUTES.items())
    return {
        _name(part): number * _NS_PER_US
        for part, text in times
        if (number := whole_number(text)) is not None
    }


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


def _steps(spans: Sequence[TimedSpan]) -> tuple[TraceStep, ...]:
    """The spans as a tree, depth first, by start. Those of transfers are in the links."""
    shown = [one for one in spans if one.span.name != schema.SPAN_TRANSFER_LINK]
    known = {one.span.span_id for one in shown}
    children: dict[str, list[TimedSpan]] = defaultdict(list)
    for one in shown:
        parent = one.span.parent_span_id
        own = parent == one.span.span_id
        children[parent if parent in known and not own else ""].append(one)
    steps: list[TraceStep] = []
    pending = [(one, 0) for one in sorted(children[""], key=_order, reverse=True)]
    while pending:
        one, depth = pending.pop()
        steps.append(_step(one, depth))
        below = sorted(children.pop(one.span.span_id, ()), key=_order, reverse=True)
        pending += [(child, depth + 1) for child in below]
    return tuple(steps)


def _order(one: TimedSpan) -> tuple[int, int]:
    return one.start_ns, -one.end_ns


def _step(one: TimedSpan, depth: int) -> TraceStep:
    span = one.span
    service = span.service.removeprefix(_SERVICE_PREFIX)
    label = span.name.removeprefix("headrace.").removeprefix(f"{service}.").replace("_", " ")
    if span.name == schema.SPAN_ATTEMPT:
        label = f"{label} {one.text(schema.ATTRIBUTE_ATTEMPT)}".rstrip()
    elif span.name == schema.SPAN_GAP:
        label = f"no token: {one.text(schema.ATTRIBUTE_GAP_CAUSE)}".removesuffix(": ")
    return TraceStep(
        depth=depth,
        name=span.name,
        label=label,
        service=service,
        worker=span.worker_id,
        start_ns=one.start_ns,
        duration_ns=one.end_ns - one.start_ns,
        error=span.error,
        note=one.text(schema.ATTRIBUTE_QUEUE_TENANTS)
        or ", ".join(f"{one.text(key)} {words}" for key, words in _TIERS.items() if one.text(key)),
    )
