"""Checks received messages against the bounds of their fields, which stand in the protos: field_bounds.proto.

A check is generated for each type of message, because a worker gets a message for each layer and each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from headrace.inference.v1 import field_bounds_pb2
from headrace_common.errors import InvalidRequest

STRING_CHARACTERS_MAX: Final = 65_536
"""Characters of a string without a bound of its own."""
DURATION_MAX_S: Final = 366 * 86_400
"""Magnitude of every Duration."""
_DURATION: Final = "google.protobuf.Duration"
_FEW_LISTS: Final = 3
_TEXTS: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

_scope: dict[str, Any] = {}
"""The generated functions, by the name of the message."""
_checks: dict[type[Message], Callable[[Any], str]] = {}


def check_of(kind: type[Message]) -> Callable[[Any], str]:
    """What returns which field of a message of this kind is beyond its bound, "" for none."""
    check = _checks.get(kind)
    if check is None:
        check = _checks[kind] = _check_of(kind.DESCRIPTOR)
    return check


def find_excess(message: Message) -> str:
    """Which field is beyond its bound, "" for none."""
    return check_of(type(message))(message)


def require_bounds(message: Message) -> None:
    """Raises InvalidRequest for a request with a field beyond its bound."""
    excess = find_excess(message)
    if excess:
        field, _, problem = excess.partition(" ")
        raise InvalidRequest({field: problem})


def bounded(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """As `parse`, which makes requests of bytes. Raises as require_bounds."""

    def parse_bounded(data: bytes) -> Any:
        message = parse(data)
        if isinstance(message, Message):
            require_bounds(message)
        return message

    return parse_bounded


def _check_of(descriptor: Any) -> Callable[[Any], str]:
    name = _name(descriptor)
    if name not in _scope:
        # A message may contain itself.
        _scope[name] = None
        tests = {one: lines for one in descriptor.fields if (lines := list(_lines(one)))}
        if not tests:
            _scope[name] = _nothing
        elif _reads_set_fields(tests):
            exec("\n".join(_by_set_fields(name, tests)), _scope)
        else:
            lines = [line for one, own in tests.items() for line in (f"v = m.{one.name}", *own)]
            exec("\n ".join([f"def {name}(m):", *lines, "return ''"]), _scope)
    check: Callable[[Any], str] = _scope[name]
    return check


def _nothing(message: Any) -> str:
    """The check of a message without bounds."""
    return ""


def _reads_set_fields(tests: Mapping[FieldDescriptor, list[str]]) -> bool:
    """Whether only fields that are set are read: reading another list or message makes an object."""
    lists = sum(one.is_repeated for one in tests)
    messages = sum(one.message_type is not None and not one.is_repeated for one in tests)
    return bool(messages) or lists > _FEW_LISTS


def _by_set_fields(name: str, tests: Mapping[FieldDescriptor, list[str]]) -> Iterator[str]:
    for field, lines in tests.items():
        yield "\n ".join([f"def {name}_{field.number}(v):", *lines, "return ''"])
    yield f"{name}_fields = {{{', '.join(f'{one.number}: {name}_{one.number}' for one in tests)}}}"
    yield f"def {name}(m):"
    yield " for d, v in m.ListFields():"
    yield f"  c = {name}_fields.get(d.number)"
    yield "  if c and (r := c(v)):"
    yield "   return r"
    yield " return ''"


def _name(descriptor: Any) -> str:
    return str(descriptor.full_name).replace(".", "_")


def _place(field: Any) -> str:
    return f"{field.name} of {field.containing_type.name}"


def bound_of(field: FieldDescriptor) -> field_bounds_pb2.FieldBound:
    """What the proto states of a field."""
    return field.GetOptions().Extensions[field_bounds_pb2.bound]


def _lines(field: FieldDescriptor) -> Iterator[str]:
    """The tests of the value `v` of a field."""
    bound = bound_of(field)
    if not field.is_repeated:
        yield from (line.removeprefix(" ") for line in _value_lines(field, "v", bound))
        return
    yield f"if len(v) > {bound.items}:"
    yield f" return f'{_place(field)} has {{len(v)}} entries, more than {bound.items}'"
    if bound.alone:
        return
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, item = entry.fields_by_name["key"], entry.fields_by_name["value"]
        tests = [*_value_lines(key, "k", bound), *_value_lines(item, "x", bound)]
        loop = "for k, x in v.items():"
    else:
        tests = list(_value_lines(field, "x", bound))
        loop = "for x in v:"
    if tests:
        yield loop
        yield from tests


def _value_lines(
    field: FieldDescriptor, value: str, bound: field_bounds_pb2.FieldBound
) -> Iterator[str]:
    """The test of one value, indented by one space."""
    where = _place(field)
    if field.type in _TEXTS:
        length = bound.length or STRING_CHARACTERS_MAX
        yield f" if len({value}) > {length}:"
        yield f"  return f'{where} has a length of {{len({value})}}, more than {length}'"
    elif field.message_type is not None and field.message_type.full_name == _DURATION:
        yield f" if not -{DURATION_MAX_S} <= {value}.seconds <= {DURATION_MAX_S}:"
        yield f"  return f'{where} is {{{value}.seconds}} s, beyond {DURATION_MAX_S}'"
    elif field.message_type is not None:
        if _check_of(field.message_type) is _nothing:
            return
        yield f" r = {_name(field.message_type)}({value})"
        yield " if r:"
        yield "  return r"
    elif bound.magnitude:
        _scope["inf"] = float("inf")
        yield f" if not -{bound.magnitude!r} <= {value} <= {bound.magnitude!r}:"
        yield f"  return f'{where} is {{{value}}}, beyond {bound.magnitude:g}'"
