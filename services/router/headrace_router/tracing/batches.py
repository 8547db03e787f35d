"""Splits exports of spans into small batches, so that no export occupies the event loop for long.

A span stays in OTLP's encoding: most spans are never read, and some are of another router's requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

from headrace_common.telemetry import schema

BATCH_ITEMS: Final = 256
ATTRIBUTES_MAX: Final = 128
_SERVICE_PREFIX: Final = "headrace-"
_NAME_CHARACTERS_MAX: Final = 128
# Field numbers with their wire types: of the export, of its parts, and at the start of a span.
_RESOURCE_SPANS: Final = 0x0A
_RESOURCE: Final = 0x0A
_SCOPE_SPANS: Final = 0x12
_SPAN: Final = 0x12
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
_NAME: Final = 0x2A
_WIRE_TYPES: Final = (0, 1, 2, 5)
_CACHED_RESOURCES: Final = 256
_CACHED_RESOURCE_BYTES: Final = 1_024
_SPAN_NAMES: Final = {
    getattr(schema, name).encode(): str(getattr(schema, name))
    for name in dir(schema)
    if name.startswith("SPAN_")
}


class RawSpan(NamedTuple):
    """A span in OTLP's encoding, with what its first bytes say. The rest may be malformed."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    name: str
    content: bytes

    def parse(self) -> otlp_pb2.Span | None:
        """The whole span. None when it is malformed."""
        try:
            return otlp_pb2.Span.FromString(self.content)
        except DecodeError:
            return None


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """At most BATCH_ITEMS spans of one process, or none. `worker_id` is empty for a router."""

    service: str
    worker_id: str
    spans: Sequence[RawSpan]


def span_batches(export: bytes) -> Iterator[SpanBatch]:
    """The spans of an ExportTraceServiceRequest, in their order. Raises DecodeError while it yields them.

    Reads at most BATCH_ITEMS messages from one batch to the next.
    """
    items = 0
    for tag, start, end in _fields(export, 0, len(export)):
        items += 1
        if tag == _RESOURCE_SPANS:
            for service, worker_id, spans in _spans_of_resource(export, start, end):
                yield SpanBatch(service, worker_id, spans)
                items = 0
        if items >= BATCH_ITEMS:
            yield SpanBatch("", "", ())
            items = 0


def _spans_of_resource(
    export: bytes, start: int, end: int
) -> Iterator[tuple[str, str, Sequence[RawSpan]]]:
    items, service, worker_id = 0, "", ""
    for tag, inner_start, inner_end in _fields(export, start, end):
        items += 1
        if tag == _RESOURCE:
            # Every known encoder writes it first.
            service, worker_id = _names_of(export[inner_start:inner_end])
        elif tag == _SCOPE_SPANS:
            spans: list[RawSpan] = []
            for scope_tag, span_start, span_end in _fields(export, inner_start, inner_end):
                items += 1
                if scope_tag == _SPAN:
                    spans.append(read_span(export[span_start:span_end]))
                if items >= BATCH_ITEMS:
                    yield service, worker_id, spans
                    items, spans = 0, []
            if spans:
                yield service, worker_id, spans
                items = 0
        if items >= BATCH_ITEMS:
            yield service, worker_id, ()
            items = 0


def read_span(content: bytes) -> RawSpan:
    """A span from its encoding. Raises DecodeError for one that is malformed at its start."""
    # The order of the fields' numbers, in which every known encoder writes.
    if content[:2] == _TRACE_ID and content[18:20] == _SPAN_ID:
        parent_id, at = b"", 28
        if content[28:30] == _PARENT_ID:
            parent_id, at = content[30:38], 38
        head = content[at : at + 2]
        if len(head) == 2 and head[0] == _NAME and head[1] < 0x80:
            name = content[at + 2 : at + 2 + head[1]]
            known = _SPAN_NAMES.get(name)
            if known is not None:
                return RawSpan(content[2:18], content[20:28], parent_id, known, content)
    span = otlp_pb2.Span.FromString(content)
    return RawSpan(span.trace_id, span.span_id, span.parent_span_id, span.name, content)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of the message in data[at:end]: each tag, and where its content starts and ends."""
    try:
        while at < end:
            tag, at = _varint(data, at)
            kind = tag & 7
            size = 0
            if kind == 2:
                size, at = _varint(data, at)
            elif kind == 0:
                _, stop = _varint(data, at)
                size = stop - at
            elif kind == 1:
                size = 8
            elif kind == 5:
                size = 4
            if kind not in _WIRE_TYPES or tag < 8:
                raise DecodeError(f"tag {tag} before byte {at}")
            stop = at + size
            if stop > end:
                raise DecodeError(f"a field ends beyond its message, at byte {at}")
            yield tag, at, stop
            at = stop
    except IndexError:
        raise DecodeError("the export is truncated") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    number = byte & 0x7F
    for shift in range(7, 70, 7):
        at += 1
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at + 1
    raise DecodeError(f"a number is too long, at byte {at}")


def _names_of(resource: bytes) -> tuple[str, str]:
    """The service and the worker id of a Resource. Raises DecodeError."""
    if len(resource) > _CACHED_RESOURCE_BYTES:
        return _parse_names(resource)
    return _cached_names(resource)


def _parse_names(resource: bytes) -> tuple[str, str]:
    attributes = attributes_as_text(resource_pb2.Resource.FromString(resource).attributes)
    service = attributes.get("service.name", "")[:_NAME_CHARACTERS_MAX]
    service = service.removeprefix(_SERVICE_PREFIX)
    instance = attributes.get("service.instance.id", "")[:_NAME_CHARACTERS_MAX]
    return service, "" if service == "router" else instance


_cached_names = lru_cache(_CACHED_RESOURCES)(_parse_names)


def attributes_as_text(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, str]:
    """The first ATTRIBUTES_MAX attributes."""
    return {pair.key: _text(pair.value) for pair in islice(pairs, ATTRIBUTES_MAX)}


def _text(value: common_pb2.AnyValue) -> str:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return ", ".join(_text(item) for item in islice(value.array_value.values, ATTRIBUTES_MAX))
    if kind == "bool_value":
        return "true" if value.bool_value else "false"
    content: Any = getattr(value, kind) if kind else ""
    return f"{content:g}" if kind == "double_value" else str(content)
