"""Ended spans as the bytes of OTLP's request.

Written without protobuf's messages, which take several times as long. headrace_common.telemetry.otlp has the same as
messages. Numbers in this module are OTLP's field numbers, each shifted by three with the field's wire type.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry.trace import SpanKind

from headrace_common.telemetry.otlp import PROTO_KINDS, SCOPE, resource_to_proto
from headrace_common.telemetry.schema_tables import SPAN_KINDS
from headrace_common.telemetry.spans import EndedSpan, SpanSource

_IDS: Final = struct.Struct("<2s16s2s8s")
_IDS_WITH_PARENT: Final = struct.Struct("<2s16s2s8s2s8s")
_TIMES: Final = struct.Struct("<BQBQ")
_EVENT_TIME: Final = struct.Struct("<BQ")
_DOUBLE: Final = struct.Struct("<d")
_WORD: Final = 0xFFFF_FFFF_FFFF_FFFF
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
_START_TIME, _END_TIME = 0x39, 0x41
_SPAN_ATTRIBUTE, _EVENT_ATTRIBUTE = 0x4A, 0x1A
_ONE_BYTE: Final = tuple(bytes((number,)) for number in range(0x80))
_HEADS_MAX: Final = 1_024
_SHORT_TEXT_BYTES: Final = 128


def encode_export(spans: Iterable[tuple[SpanSource, EndedSpan]]) -> bytes:
    """The spans as one request to a collector, those of one source together."""
    by_source: dict[int, tuple[SpanSource, list[bytes]]] = {}
    for source, span in spans:
        found = by_source.get(id(source))
        if found is None:
            found = by_source[id(source)] = (source, [_SCOPE])
        body = encode_span(span)
        found[1].extend((b"\x12", _varint(len(body)), body))
    return b"".join(
        _field(0x0A, _resource(source) + _field(0x12, b"".join(parts)))
        for source, parts in by_source.values()
    )


def encode_span(span: EndedSpan) -> bytes:
    """One span, without its source. It begins with the trace's id, its own id, its parent's id and its name."""
    trace_id = span.trace_id.to_bytes(16, "big")
    span_id = span.span_id.to_bytes(8, "big")
    if span.parent_id:
        parent_id = span.parent_id.to_bytes(8, "big")
        ids = _IDS_WITH_PARENT.pack(_TRACE_ID, trace_id, _SPAN_ID, span_id, _PARENT_ID, parent_id)
    else:
        ids = _IDS.pack(_TRACE_ID, trace_id, _SPAN_ID, span_id)
    parts = [
        ids,
        _NAMES.get(span.name) or _name(span.name),
        _TIMES.pack(_START_TIME, span.start_unix_ns, _END_TIME, span.end_unix_ns),
    ]
    _add_attributes(parts, _SPAN_HEADS, span.attributes)
    for name, unix_ns, details in span.events:
        event = [_EVENT_TIME.pack(0x09, unix_ns), _field(0x12, _text(name))]
        _add_attributes(event, _EVENT_HEADS, details)
        parts.append(_field(0x5A, b"".join(event)))
    for linked_trace_id, linked_span_id in span.links:
        link = (linked_trace_id.to_bytes(16, "big"), linked_span_id.to_bytes(8, "big"))
        parts.append(_field(0x6A, _IDS.pack(_TRACE_ID, link[0], _SPAN_ID, link[1])))
    if span.error:
        parts.append(_field(0x7A, _field(0x12, _text(span.error)) + b"\x18\x02"))
    return b"".join(parts)


class _Heads:
    """What precedes the values of one attribute."""

    __slots__ = ("double", "integers", "key", "tag", "texts")

    def __init__(self, tag: int, key: str) -> None:
        self.tag = tag
        self.key = _field(0x0A, _text(key))
        self.double = self._head(9) + b"\x21"
        self.integers = tuple(self._head(1 + size) + b"\x18" for size in range(11))
        """By the bytes of the number."""
        self.texts: dict[int, bytes] = {}
        """By the bytes of a short text."""

    def text(self, size: int) -> bytes:
        """For a text of `size` bytes."""
        length = b"\x0a" + _varint(size)
        head = self._head(len(length) + size) + length
        if size < _SHORT_TEXT_BYTES:
            self.texts[size] = head
        return head

    def other(self, value: bytes) -> bytes:
        """The whole attribute, from the bytes of its AnyValue."""
        return self._head(len(value)) + value

    def _head(self, size: int) -> bytes:
        """For an AnyValue of `size` bytes."""
        value = b"\x12" + _varint(size)
        length = len(self.key) + len(value) + size
        return _ONE_BYTE[self.tag] + _varint(length) + self.key + value


class _HeadTable:
    """The heads of the attributes of spans, or of events. A process has as many as the schema has attributes."""

    def __init__(self, tag: int) -> None:
        self._tag = tag
        self._heads: dict[str, _Heads] = {}
        self.get = self._heads.get

    def add(self, key: str) -> _Heads:
        heads = _Heads(self._tag, key)
        if len(self._heads) < _HEADS_MAX:
            self._heads[key] = heads
        return heads


def _add_attributes(parts: list[bytes], table: _HeadTable, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        heads = table.get(key) or table.add(key)
        kind = type(value)
        if kind is str:
            text = value.encode("utf-8", "replace")
            size = len(text)
            parts += (heads.texts.get(size) or heads.text(size), text)
        elif kind is int:
            number = _varint(value & _WORD)
            parts += (heads.integers[len(number)], number)
        elif kind is float:
            parts += (heads.double, _DOUBLE.pack(value))
        else:
            parts.append(heads.other(_any_value(value)))


def _any_value(value: Any) -> bytes:
    if isinstance(value, str):
        return _field(0x0A, _text(value))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & _WORD)
    if isinstance(value, float):
        return b"\x21" + _DOUBLE.pack(value)
    return _field(0x2A, b"".join(_field(0x0A, _any_value(item)) for item in value))


def _name(name: str) -> bytes:
    """The name of a span with its kind."""
    kind = PROTO_KINDS[SPAN_KINDS.get(name, SpanKind.INTERNAL)]
    return _field(0x2A, _text(name)) + b"\x30" + _varint(kind)


def _resource(source: SpanSource) -> bytes:
    return _field(0x0A, resource_to_proto(source.resource).SerializeToString())


def _field(tag: int, content: bytes) -> bytes:
    return _ONE_BYTE[tag] + _varint(len(content)) + content


def _text(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _ONE_BYTE[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    content = bytearray()
    while number >= 0x80:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    content.append(number)
    return bytes(content)


_SPAN_HEADS: Final = _HeadTable(_SPAN_ATTRIBUTE)
_EVENT_HEADS: Final = _HeadTable(_EVENT_ATTRIBUTE)
_NAMES: Final = {name: _name(name) for name in SPAN_KINDS}
_SCOPE: Final = _field(0x0A, _field(0x0A, _text(SCOPE)))
