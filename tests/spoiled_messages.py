"""Messages of a hostile peer: valid ones, and such with some fields set to values at and beyond the edges."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_CHANGES_MAX: Final = 3
_MANY: Final = (1, 2, 3, 70_000)
_TEXTS: Final = ("", "x", "d0", "a", "x1", "\x1b[2J\n", "y" * 5_000, "z" * 70_000)
_DOUBLES: Final = (0.0, -1.0, 0.5, 1e11, 1e308, math.inf, -math.inf, math.nan)
_SIZES: Final = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
}


def hostile_messages(goods: Sequence[Message], count: int, seed: int) -> Iterator[Message]:
    """Half of them are valid ones in turn, so that a stream goes on. Equal arguments give equal messages."""
    numbers = random.Random(seed)
    for index in range(count):
        good = goods[index // 2 % len(goods)]
        message = type(good)()
        message.CopyFrom(good)
        if index % 2:
            for _ in range(numbers.randint(1, _CHANGES_MAX)):
                _spoil(numbers, message)
        yield message


def _spoil(numbers: random.Random, message: Message) -> None:
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field: Any = numbers.choice(fields)
    value = getattr(message, field.name)
    if field.is_repeated and field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            message.ClearField(field.name)
        elif value and numbers.random() < 0.8:
            _spoil(numbers, numbers.choice(value))
        elif numbers.random() < 0.5:
            value.extend([field.message_type._concrete_class()] * numbers.choice(_MANY))
        else:
            message.ClearField(field.name)
    elif field.is_repeated:
        value.extend([_value(numbers, field)] * numbers.choice(_MANY))
    elif field.message_type is not None:
        if numbers.random() < 0.1:
            message.ClearField(field.name)
        else:
            value.SetInParent()
            _spoil(numbers, value)
    else:
        setattr(message, field.name, _value(numbers, field))


def _value(numbers: random.Random, field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return numbers.choice(_TEXTS[:6] if field.is_repeated else _TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"\xff" * numbers.choice((0, 1, 8, 16, 2_000, 70_000))
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return numbers.choice(_DOUBLES)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return numbers.random() < 0.5
    least, most = _SIZES[field.type]
    return numbers.choice((least, 0, 1, 2, numbers.randint(least, most), most))
