"""Invalid messages: random ones of any type, and valid ones with some fields changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_INT32_MAX: Final = 2**31 - 1
_DEPTH_MAX: Final = 4
_KINDS = FieldDescriptor


def _integers(least: int, most: int) -> st.SearchStrategy[int]:
    edges = [value for value in (0, 1, 2, 5, -1, least, most) if least <= value <= most]
    return st.sampled_from(edges) | st.integers(least, most)


_SIGNED_32 = _integers(-_INT32_MAX - 1, _INT32_MAX)
_SIGNED_64 = _integers(-(2**63), 2**63 - 1)
_UNSIGNED_32 = _integers(0, 2**32 - 1)
_UNSIGNED_64 = _integers(0, 2**64 - 1)
_NUMBERS: dict[int, st.SearchStrategy[Any]] = {
    _KINDS.TYPE_INT32: _SIGNED_32,
    _KINDS.TYPE_SINT32: _SIGNED_32,
    _KINDS.TYPE_SFIXED32: _SIGNED_32,
    _KINDS.TYPE_ENUM: _SIGNED_32,
    _KINDS.TYPE_INT64: _SIGNED_64,
    _KINDS.TYPE_SINT64: _SIGNED_64,
    _KINDS.TYPE_SFIXED64: _SIGNED_64,
    _KINDS.TYPE_UINT32: _UNSIGNED_32,
    _KINDS.TYPE_FIXED32: _UNSIGNED_32,
    _KINDS.TYPE_UINT64: _UNSIGNED_64,
    _KINDS.TYPE_FIXED64: _UNSIGNED_64,
    _KINDS.TYPE_BOOL: st.booleans(),
    _KINDS.TYPE_DOUBLE: st.floats() | st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e308]),
    _KINDS.TYPE_FLOAT: st.floats(width=32),
}


def mostly(
    likely: st.SearchStrategy[Any], seldom: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """Draws three values of four from `likely`."""
    return st.sampled_from(range(4)).flatmap(lambda drawn: likely if drawn else seldom)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


class Fuzz:
    """Draws messages. `words` are ids that exist in the deployment, so that some messages pass the first checks."""

    def __init__(self, words: Sequence[str]) -> None:
        texts = st.sampled_from(["", "x", "\u00e9\u0000", "y" * 20_000, *words])
        self._texts = texts | st.text(max_size=8)
        encoded = st.sampled_from([b"", b"\xff" * 8, b"z" * 20_000])
        self._bytes = encoded | st.binary(max_size=12)

    def messages(self, kind: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
        """Draws any message of a type with some fields absent. Of a oneof the last drawn field remains."""
        return st.builds(self._filled, st.just(kind), self._some_fields(kind, depth))

    def spoiled(self, good: Message) -> st.SearchStrategy[Message]:
        """Draws a valid message with one to three fields, at any depth, redrawn or removed."""

        def spoil(changes: list[tuple[str, Any]]) -> Message:
            message = type(good)()
            message.CopyFrom(good)
            for name, value in changes:
                message.ClearField(name)
                if value is not None:
                    _set(message, message.DESCRIPTOR.fields_by_name[name], value)
            return message

        changes = [
            st.tuples(st.just(field.name), self._values_near(good, field))
            for field in good.DESCRIPTOR.fields
        ]
        return st.lists(st.one_of(changes), min_size=1, max_size=3).map(spoil)

    def _values_near(self, good: Message, field: Any) -> st.SearchStrategy[Any]:
        anew = st.none() | self._values(field, 1)
        held = getattr(good, field.name)
        if field.message_type is None or _is_map(field) or not field.message_type.fields:
            return anew
        if not field.is_repeated:
            return mostly(self.spoiled(held), anew) if good.HasField(field.name) else anew
        if not held:
            return anew
        places = [st.tuples(st.just(at), self.spoiled(one)) for at, one in enumerate(held)]
        spoiled = st.one_of(places).map(
            lambda place: [*held[: place[0]], place[1], *held[place[0] + 1 :]]
        )
        return mostly(spoiled, anew)

    def _some_fields(
        self, kind: Descriptor, depth: int
    ) -> st.SearchStrategy[list[tuple[str, Any]]]:
        fields = [
            st.tuples(st.just(field.name), self._values(field, depth + 1))
            for field in kind.fields
            if depth < _DEPTH_MAX or field.message_type is None
        ]
        return st.lists(st.one_of(fields), max_size=6) if fields else st.just([])

    def _filled(self, kind: Descriptor, values: list[tuple[str, Any]]) -> Message:
        message = message_factory.GetMessageClass(kind)()
        for name, value in values:
            message.ClearField(name)
            _set(message, kind.fields_by_name[name], value)
        return message

    def _values(self, field: Any, depth: int) -> st.SearchStrategy[Any]:
        if _is_map(field):
            fields = field.message_type.fields_by_name
            keys, values = (self._single(fields[name], depth) for name in ("key", "value"))
            return st.dictionaries(keys, values, max_size=3)
        single = self._single(field, depth)
        if not field.is_repeated:
            return single
        few = st.lists(single, max_size=3)
        return few | single.map(lambda value: [value] * 5_000) if depth < 2 else few

    def _single(self, field: Any, depth: int) -> st.SearchStrategy[Any]:
        if field.message_type is not None:
            return self.messages(field.message_type, depth)
        if field.type == _KINDS.TYPE_STRING:
            return self._texts
        if field.type == _KINDS.TYPE_BYTES:
            return self._bytes
        return _NUMBERS[field.type]


def _set(message: Message, field: Any, value: Any) -> None:
    target = getattr(message, field.name)
    if isinstance(value, dict):
        for key, entry in value.items():
            if isinstance(entry, Message):
                target[key].CopyFrom(entry)
            else:
                target[key] = entry
    elif field.is_repeated:
        target.extend(value)
    elif field.message_type is not None:
        target.SetInParent()
        target.CopyFrom(value)
    else:
        setattr(message, field.name, value)
