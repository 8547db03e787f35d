"""Visits the fields of a serialized message, before protobuf makes an object for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor

from headrace_common.errors import InvalidRequest

_VARINT_BYTES_MAX = 10
_FIELD_BYTES_MIN = 2
_LENGTH_DELIMITED = 2

_Types: TypeAlias = dict[int, Descriptor]
_Outer: TypeAlias = tuple[int, Descriptor, _Types, int]
"""A message around the current one: its end, its type, the types of its fields that are messages, and the number of
the field that contains the current one.
"""


class MalformedMessage(Exception):
    """Protobuf rejects the message too."""


class _TooManyFields(Exception):
    """`path` names the repeated field that exceeds the bound, or is empty."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def require_few_fields(data: bytes, message_type: Descriptor, fields_max: int) -> None:
    """Raises InvalidRequest if the message and its nested messages have more than `fields_max` fields.

    The work is bounded by `fields_max`, not by the length of the data. Accepts malformed data, which protobuf rejects.
    """
    if len(data) <= fields_max * _FIELD_BYTES_MIN:
        return
    try:
        _count_fields(data, message_type, fields_max)
    except MalformedMessage:
        return
    except _TooManyFields as error:
        raise InvalidRequest(
            {
                error.path or "request": "the request has more than "
                f"{fields_max} fields here and before; send fewer, and numbers packed"
            }
        ) from None


def _count_fields(data: bytes, message_type: Descriptor, fields_max: int) -> None:
    """Visits every field. One loop without calls in the usual case: it runs on the event loop."""
    outer: list[_Outer] = []
    nested = _nested_types(message_type)
    position, end, count = 0, len(data), 0
    while True:
        if position >= end:
            if position > end:
                raise MalformedMessage
            if not outer:
                return
            end, message_type, nested, _ = outer.pop()
            continue
        tag = data[position]
        position += 1
        if tag >= 0x80:
            tag, position = _varint(data, position - 1, end)
        count += 1
        if count > fields_max:
            raise _TooManyFields(_path(outer, message_type, tag >> 3))
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            length = data[position] if position < end else 0x80
            position += 1
            if length >= 0x80:
                length, position = _varint(data, position - 1, end)
            inner = nested.get(tag >> 3)
            if inner is None:
                position += length
                continue
            if position + length > end:
                raise MalformedMessage
            outer.append((end, message_type, nested, tag >> 3))
            end, message_type = position + length, inner
            nested = _nested_types(inner)
        else:
            position = _skip(data, wire_type, position, end)


def fields_of(data: bytes, start: int, end: int) -> Iterator[tuple[int, int | None, int]]:
    """The fields of the message between two positions: number, start of the content, and end.

    The start is None for a value without a length. Raises MalformedMessage.
    """
    position = start
    while position < end:
        tag, position = _varint(data, position, end)
        content: int | None = None
        if tag & 7 == _LENGTH_DELIMITED:
            length, content = _varint(data, position, end)
            position = content + length
        else:
            position = _skip(data, tag & 7, position, end)
        if position > end:
            raise MalformedMessage
        yield tag >> 3, content, position


@lru_cache(maxsize=256)
def _nested_types(message_type: Descriptor) -> _Types:
    """The types of the fields that are messages, by field number."""
    return {
        field.number: field.message_type
        for field in message_type.fields
        if field.message_type is not None
    }


def _skip(data: bytes, wire_type: int, position: int, end: int) -> int:
    """The end of a value without a length."""
    match wire_type:
        case 0:
            return _varint(data, position, end)[1]
        case 1:
            return position + 8
        case 5:
            return position + 4
        case 3 | 4:
            # The fields of a group count as fields of the message.
            return position
        case _:
            raise MalformedMessage


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_BYTES_MAX):
        if position + index >= end:
            break
        byte = data[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise MalformedMessage


def _path(outer: Sequence[_Outer], message_type: Descriptor, number: int) -> str:
    """The path to a field, up to the first repeated one. It ends before an unknown field."""
    path: list[str] = []
    for containing_type, at in (*((kind, at) for _, kind, _, at in outer), (message_type, number)):
        field = containing_type.fields_by_number.get(at)
        if field is None:
            break
        path.append(field.name)
        if field.is_repeated:
            break
    return ".".join(path)
