"""What the records in etcd contain, and which of them cannot be read. Any program may have written them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_registry import validation

_log = logging.getLogger(__name__)

Content: TypeAlias = registry_pb2.Member | layout_pb2.KvDescriptor | registry_pb2.Policy

_Message = TypeVar("_Message", registry_pb2.Member, layout_pb2.KvDescriptor, registry_pb2.Policy)

PREFIX_HASH_KEY_BYTES: Final = 8
_REPORTED_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Record:
    """The value of one key; None when deleted. `key` is without the prefix, `revision` of the last change."""

    key: str
    value: bytes | None
    lease: int
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Every record at one revision of one etcd cluster, with its content. Corrupt ones have their error instead."""

    cluster_id: int
    revision: int
    records: tuple[tuple[Record, Content | CorruptRecord | None], ...]


class CorruptRecord(ValueError):
    """A record's value is not what its key promises. The message has no part of the value."""


def read_record(record: Record) -> Content | None:
    """The message in a record. None for a deleted record and for other keys. Raises CorruptRecord."""
    kind, _, name = record.key.partition("/")
    if record.value is None:
        return None
    if kind == "members":
        return read_member(record.value, name)
    if kind == "descriptors":
        return read_descriptor(record.value)
    if record.key == "policy":
        policy = _parse(registry_pb2.Policy(), record.value)
        _require(validation.policy_violations(policy, "policy"))
        return policy
    if record.key == "prefix_hash_key":
        read_key(record.value)
    return None


def try_read(record: Record) -> Content | CorruptRecord | None:
    """As read_record, but returns the error."""
    try:
        return read_record(record)
    except CorruptRecord as error:
        return error


def read_member(value: bytes, worker_id: str) -> registry_pb2.Member:
    """Raises CorruptRecord."""
    member = _parse(registry_pb2.Member(), value)
    _require(validation.member_violations(member, "member"))
    if member.worker_id != worker_id:
        raise CorruptRecord("member.worker_id is not that of the key")
    return member


def read_descriptor(value: bytes) -> layout_pb2.KvDescriptor:
    """Raises CorruptRecord."""
    descriptor = _parse(layout_pb2.KvDescriptor(), value)
    _require(validation.descriptor_violations(descriptor, "descriptor"))
    return descriptor


def read_key(value: bytes) -> bytes:
    """The bytes of the key `prefix_hash_key`. Raises CorruptRecord."""
    try:
        key = bytes.fromhex(value.decode("ascii"))
    except ValueError:
        # The cause would contain the value.
        raise CorruptRecord("it is not a hexadecimal number") from None
    if len(key) != PREFIX_HASH_KEY_BYTES:
        raise CorruptRecord(f"it has {len(key)} bytes, not {PREFIX_HASH_KEY_BYTES}")
    return key


class CorruptRecords:
    """The records in etcd that cannot be read now. Each is logged once."""

    def __init__(self) -> None:
        self._revisions: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._revisions)

    def add(self, record: Record, error: CorruptRecord) -> None:
        if self._revisions.get(record.key) == record.revision:
            return
        if record.key in self._revisions or len(self._revisions) < _REPORTED_MAX:
            self._revisions[record.key] = record.revision
            _log.error(
                "the record %r in etcd is corrupt and is skipped (%s). Another program may have written it. Delete it",
                record.key,
                error,
            )

    def discard(self, key: str) -> None:
        """The record was deleted or replaced."""
        self._revisions.pop(key, None)

    def keep_only(self, keys: frozenset[str]) -> None:
        """No other record exists."""
        self._revisions = {
            key: revision for key, revision in self._revisions.items() if key in keys
        }


def _parse(message: _Message, value: bytes) -> _Message:
    try:
        message.ParseFromString(value)
    except DecodeError:
        raise CorruptRecord(f"it is not a {message.DESCRIPTOR.name}") from None
    return message


def _require(violations: Mapping[str, str]) -> None:
    if violations:
        name, remedy = next(iter(violations.items()))
        raise CorruptRecord(f"{name}: {remedy}")
