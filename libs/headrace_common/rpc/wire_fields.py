"""Counts the fields of a serialized message, before protobuf makes an object for each."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

from headrace_common.errors import InvalidRequest

_VARINT_BYTES_MAX = 10
_FIELD_BYTES_MIN = 2


class _MalformedMessage(Exception):
    """Protobuf rejects the message too."""


def require_few_fields(data: bytes, message_type: Descriptor, fields_max: int) -> None:
    """Raises InvalidRequest if the message and its nested messages have more than `fields_max` fields.

    The work is bounded by `fields_max`, not by the length of the data. Accepts malformed data, which protobuf rejects.
    """
    if len(data) <= fields_max * _FIELD_BYTES_MIN:
        return
    counter = _FieldCounter(data, fields_max)
    try:
        counter.count(0, len(data), message_type, "")
    except _MalformedMessage:
        return


class _FieldCounter:
    def __init__(self, data: bytes, fields_max: int) -> None:
        self._data = data
        self._fields_max = fields_max
        self._count = 0

    def count(self, start: int, end: int, message_type: Descriptor, path: str) -> None:
        """Counts the fields between two positions. `path` names the repeated field that contains them, or is empty."""
        position = start
        while position < end:
            tag, position = self._varint(position, end)
            field = message_type.fields_by_number.get(tag >> 3)
            own_path = path
            if field is not None and not path.endswith("[]"):
                own_path = f"{path}.{field.name}" if path else field.name
                own_path += "[]" if field.is_repeated else ""
            self._count += 1
            if self._count > self._fields_max:
                raise InvalidRequest(
                    {
                        own_path.removesuffix("[]") or "request": "the request has more than "
                        f"{self._fields_max} fields here and before; send fewer, and numbers packed"
                    }
                )
            content, position = self._skip(tag & 7, position, end)
            if content is not None and field is not None and field.message_type is not None:
                self.count(content, position, field.message_type, own_path)

    def _skip(self, wire_type: int, position: int, end: int) -> tuple[int | None, int]:
        """The start of a length-delimited value, and the end of any value."""
        content: int | None = None
        match wire_type:
            case 0:
                _, position = self._varint(position, end)
            case 1:
                position += 8
            case 2:
                length, content = self._varint(position, end)
                position = content + length
            case 5:
                position += 4
            case 3 | 4:
                # The fields of a group count as fields of the message.
                pass
            case _:
                raise _MalformedMessage
        if position > end:
            raise _MalformedMessage
        return content, position

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value = 0
        for index in range(_VARINT_BYTES_MAX):
            if position + index >= end:
                break
            byte = self._data[position + index]
            value |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                return value, position + index + 1
        raise _MalformedMessage
