"""Finds the invalid fields of a message that protobuf cannot parse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

_LENGTH_DELIMITED = 2
_DEPTH_MAX = 32


def invalid_text_fields(data: bytes, message_type: Descriptor) -> list[str]:
    """Paths of the string fields of `data` that are not UTF-8, such as "chat.messages[1].content".

    Empty when `data` is malformed in another way.
    """
    try:
        return list(_walk(data, message_type, "", 0))
    except DecodeError:
        return []


def _walk(data: bytes, message_type: Descriptor, prefix: str, depth: int) -> Iterator[str]:
    if depth == _DEPTH_MAX:
        return
    # Empty has no fields, so protobuf keeps every field of the data as an unknown one.
    raw = Empty()
    raw.ParseFromString(data)
    occurrences: dict[int, int] = {}
    unknown_fields: Any = UnknownFieldSet(raw)
    for unknown in unknown_fields:
        field = message_type.fields_by_number.get(unknown.field_number)
        if field is None or unknown.wire_type != _LENGTH_DELIMITED:
            continue
        index = occurrences.get(field.number, 0)
        occurrences[field.number] = index + 1
        path = f"{prefix}{field.name}" + (f"[{index}]" if field.is_repeated else "")
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(unknown.data):
            yield path
        elif field.message_type is not None:
            yield from _walk(unknown.data, field.message_type, f"{path}.", depth + 1)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
