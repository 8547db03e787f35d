"""The bounds of fields in the protos: which fields have one, and what is refused."""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

import headrace
from headrace.kv.v1 import handoff_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.access.table import ROLES, Listener
from headrace_common.errors import InvalidRequest, ProtocolViolation
from headrace_common.rpc.channel import ServiceChannel
from headrace_common.rpc.field_bounds import (
    DURATION_MAX_S,
    STRING_CHARACTERS_MAX,
    bound_of,
    bounded,
    find_excess,
)
from headrace_common.rpc.status import error_from_rpc
from tests.local_channel import ScriptedCalls

_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
# Larger values take a while to make, and the check of their length is the same.
_MADE_MAX = 70_000


def internal_messages() -> dict[str, Descriptor]:
    """Every message that an internal RPC can carry, by its full name."""
    for package in map(Path, headrace.__path__):
        for path in package.glob("*/v1/*_pb2.py"):
            importlib.import_module(f"headrace.{path.parent.parent.name}.v1.{path.stem}")
    pool = descriptor_pool.Default()
    found: dict[str, Descriptor] = {}

    def add(descriptor: Any) -> None:
        if descriptor.full_name in found or not descriptor.full_name.startswith("headrace."):
            return
        found[descriptor.full_name] = descriptor
        for field in descriptor.fields:
            if field.message_type is not None:
                add(field.message_type)

    for rpc in ROLES[Listener.INTERNAL]:
        service, _, name = rpc[1:].partition("/")
        if service.startswith("headrace."):
            method = pool.FindServiceByName(service).methods_by_name[name]
            add(method.input_type)
            add(method.output_type)
    return found


MESSAGES = internal_messages()


def is_entry(descriptor: Any) -> bool:
    """Whether it is the entry of a map, of which the map has the bounds."""
    return bool(descriptor.GetOptions().map_entry)


@pytest.mark.parametrize("name", [name for name, one in MESSAGES.items() if not is_entry(one)])
def test_every_list_text_and_number_of_internal_messages_has_a_bound(name: str) -> None:
    for field in MESSAGES[name].fields:
        bound, value = bound_of(field), field
        if field.is_repeated:
            assert bound.items, f"{field.full_name} needs (bound).items"
        if field.is_repeated and field.message_type is not None and is_entry(field.message_type):
            value = field.message_type.fields_by_name["value"]
        if value.type == FieldDescriptor.TYPE_BYTES:
            assert bound.length, f"{field.full_name} needs (bound).length"
        if value.type in _FLOATS:
            assert bound.magnitude, f"{field.full_name} needs (bound).magnitude"


def test_only_the_requests_of_a_link_are_checked_alone() -> None:
    alone = [
        one.full_name for kind in MESSAGES.values() for one in kind.fields if bound_of(one).alone
    ]
    assert alone == ["headrace.decode.v1.LinkRequest.opens"]


def beyond(field: FieldDescriptor) -> Iterator[Any]:
    """Values of a field that is no list which are just beyond its bound."""
    bound = bound_of(field)
    length = bound.length or STRING_CHARACTERS_MAX
    if field.type == FieldDescriptor.TYPE_STRING and length <= _MADE_MAX:
        yield "x" * (length + 1)
    elif field.type == FieldDescriptor.TYPE_BYTES and length <= _MADE_MAX:
        yield b"x" * (length + 1)
    elif field.type in _FLOATS:
        yield from (math.nan, *([] if math.isinf(bound.magnitude) else [bound.magnitude * 1.01]))
        yield from ([] if math.isinf(bound.magnitude) else [-math.inf, math.inf])


@pytest.mark.parametrize("name", [name for name, one in MESSAGES.items() if not is_entry(one)])
def test_a_value_beyond_its_bound_is_refused_by_its_name(name: str) -> None:
    kind: Any = message_factory.GetMessageClass(MESSAGES[name])
    assert find_excess(kind()) == ""
    for field in MESSAGES[name].fields:
        message = kind()
        if not field.is_repeated:
            for value in beyond(field):
                setattr(message, field.name, value)
                assert find_excess(message).startswith(f"{field.name} of {MESSAGES[name].name} ")
            continue
        items = bound_of(field).items
        if items <= _MADE_MAX:
            fill(getattr(message, field.name), field, items + 1)
            assert find_excess(message).startswith(f"{field.name} of ")


def fill(entries: Any, field: Any, count: int) -> None:
    """Gives a list or a map so many entries."""
    kind = field.message_type
    if kind is not None and is_entry(kind):
        is_text = kind.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
        value = kind.fields_by_name["value"]
        for number in range(count):
            key = str(number) if is_text else number
            if value.message_type is not None:
                entries.get_or_create(key)
            else:
                entries[key] = value.default_value
    elif kind is not None:
        entries.extend([message_factory.GetMessageClass(kind)()] * count)
    else:
        is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        entries.extend(["" if is_text else 0] * count)


def test_a_field_deep_in_a_message_is_found() -> None:
    status = worker_pb2.WatchStatusResponse()
    status.times.links["decode-0"].fixed_s = 1e308
    batch = handoff_pb2.HandoffRequestBatch(
        requests=[handoff_pb2.HandoffRequest(open=handoff_pb2.Open(ticket=bytes(2_000)))]
    )
    policy = registry_pb2.Policy(tenant_weights={"a": math.nan})
    member = registry_pb2.RegisterRequest()
    member.ttl.seconds = DURATION_MAX_S + 1
    cases: list[tuple[Message, str]] = [
        (status, "fixed_s of HandoverTimes is 1e+308, beyond 3600"),
        (handoff_pb2.HandoffRequest(batch=batch), "ticket of Open has a length of 2000"),
        (policy, "value of TenantWeightsEntry is nan"),
        (member, "ttl of RegisterRequest is 31622401 s"),
    ]
    for message, excess in cases:
        assert find_excess(message).startswith(excess)
        with pytest.raises(InvalidRequest) as raised:
            bounded(type(message).FromString)(message.SerializeToString())
        assert list(raised.value.metadata) == [excess.split()[0]]


def spoil(message: Any) -> bool:
    """Gives a field of a message, or of one within it, a value beyond its bound. Whether there is such a field."""
    for field in message.DESCRIPTOR.fields:
        if not field.is_repeated:
            for value in beyond(field):
                setattr(message, field.name, value)
                return True
        if field.is_repeated and bound_of(field).items <= _MADE_MAX:
            fill(getattr(message, field.name), field, bound_of(field).items + 1)
            return True
        if field.message_type is not None and field.message_type.name == "Duration":
            getattr(message, field.name).seconds = DURATION_MAX_S + 1
            return True
    return any(
        spoil(getattr(message, one.name).add() if one.is_repeated else getattr(message, one.name))
        for one in message.DESCRIPTOR.fields
        if one.message_type is not None and one.message_type.full_name in MESSAGES
    )


class _Answering(ScriptedCalls):
    """A channel, and each of its calls, on which one response arrives."""

    def __init__(self, response: Message) -> None:
        self._response = response
        self.cancelled = False

    def __await__(self) -> Generator[Any, Any, Message]:
        yield from asyncio.sleep(0).__await__()
        return self._response

    async def __aiter__(self) -> AsyncIterator[Message]:
        yield self._response

    async def read(self) -> Message:
        return self._response

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("rpc", [one for one in ROLES[Listener.INTERNAL] if "/headrace." in one])
async def test_a_response_beyond_a_bound_fails_the_call_of_every_internal_rpc(rpc: str) -> None:
    service, _, name = rpc[1:].partition("/")
    method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    response = message_factory.GetMessageClass(method.output_type)()
    if not spoil(response):
        # Integers and enums have all values of their types.
        assert all(one.message_type is None for one in method.output_type.fields)
        return
    server: Any = _Answering(response)
    channel = ServiceChannel(lambda: None, lambda _: server)
    call = channel.unary_stream(rpc)
    for receiving in (call(), call().read(), anext(call().__aiter__())):
        server.cancelled = False
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await receiving
        assert isinstance(error_from_rpc(raised.value), ProtocolViolation)
        assert server.cancelled
