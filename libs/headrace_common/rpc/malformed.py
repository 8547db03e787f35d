"""Finds the invalid fields of a message that protobuf cannot parse."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace_common.rpc.wire_fields import MalformedMessage, fields_of

_DEPTH_MAX = 32
# The search runs on the event loop.
_FIELDS_MAX = 256


def invalid_text_fields(data: bytes, message_type: Descriptor) -> list[str]:
    """Paths of the string fields of `data` that are not UTF-8, such as "chat.messages[1].content".

    Searches the first fields only. Empty when none of these is such a field, or when they are malformed in another way.
    """
    try:
        return list(_search(data, 0, len(data), message_type, "", 0, iter(range(_FIELDS_MAX))))
    except MalformedMessage:
        return []


def _search(
    data: bytes,
    start: int,
    end: int,
    message_type: Descriptor,
    prefix: str,
    depth: int,
    budget: Iterator[int],
) -> Iterator[str]:
    """Takes one from `budget` for each field, and ends with it."""
    if depth == _DEPTH_MAX:
        return
    occurrences: dict[int, int] = {}
    for _, (number, content, value_end) in zip(budget, fields_of(data, start, end), strict=False):
        field = message_type.fields_by_number.get(number)
        if field is None or content is None:
            continue
        index = occurrences.get(number, 0)
        occurrences[number] = index + 1
        path = f"{prefix}{field.name}" + (f"[{index}]" if field.is_repeated else "")
        if field.type == FieldDescriptor.TYPE_STRING:
            if not _is_utf8(data[content:value_end]):
                yield path
        elif field.message_type is not None:
            yield from _search(
                data, content, value_end, field.message_type, f"{path}.", depth + 1, budget
            )


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
