"""The registry's records in etcd: their keys, their contents, and atomic changes of them. Blocking.

- `<prefix>members/<worker id>`: Member, bound to the member's lease
- `<prefix>descriptors/<worker id>/<incarnation>`: KvDescriptor, bound to the same lease
- `<prefix>policy`: Policy
- `<prefix>prefix_hash_key`: 16 hex digits, written once

Revisions are etcd's own, so all registries over one etcd agree on them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import Conflict
from headrace_registry import validation
from headrace_registry.store.base import (
    Registration,
    new_prefix_hash_key,
    registered,
    require_owner,
    require_policy_revision,
)
from headrace_registry.store.etcd_connection import load_etcd3
from headrace_registry.store.etcd_endpoint import code_of

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
        member = _parse(registry_pb2.Member(), record.value)
        _require(validation.member_violations(member, "member"))
        if member.worker_id != name:
            raise CorruptRecord("member.worker_id is not that of the key")
        return member
    if kind == "descriptors":
        descriptor = _parse(layout_pb2.KvDescriptor(), record.value)
        _require(validation.descriptor_violations(descriptor, "descriptor"))
        return descriptor
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


def read_key(value: bytes) -> int:
    """The key `prefix_hash_key`. Raises CorruptRecord."""
    try:
        key = bytes.fromhex(value.decode("ascii"))
    except ValueError:
        # The cause would contain the value.
        raise CorruptRecord("it is not a hexadecimal number") from None
    if len(key) != PREFIX_HASH_KEY_BYTES:
        raise CorruptRecord(f"it has {len(key)} bytes, not {PREFIX_HASH_KEY_BYTES}")
    return int.from_bytes(key)


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


# One key has few writers. More conflicts in a row than this have another cause.
_ATTEMPTS = 5


class EtcdTable:
    """The records under one prefix, through one etcd3 client. Has no state; any thread may call it.

    A corrupt record counts as absent, so the next write of its key replaces it.

    Raises etcd3's and gRPC's exceptions, which EtcdConnection converts to RegistryUnavailable.
    """

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self.prefix = prefix

    def list_records(self) -> Listing:
        """All records under the prefix, as of etcd's leader."""
        response = self._client.get_prefix_response(self.prefix)
        return Listing(
            cluster_id=response.header.cluster_id,
            revision=response.header.revision,
            records=tuple((record, try_read(record)) for record in self._parse(response.kvs)),
        )

    def current_revision(self) -> int:
        """etcd's current revision."""
        response = self._client.get_response(self._key("policy"))
        return int(response.header.revision)

    def register(self, member: registry_pb2.Member, ttl_s: int) -> Registration:
        """As Store.register."""
        key = _member_key(member.worker_id)
        for _ in range(_ATTEMPTS):
            found, revision_read = self._read_at(key)
            current = _parse_member(found)
            record = registered(current, member, revision_read)
            lease = self._client.lease(ttl_s)
            writes = {key: (record.SerializeToString(), lease.id)}
            unchanged = [found or Record(key, None, 0, 0)]
            if current is not None and current.incarnation == member.incarnation:
                kept = self._read(_descriptor_key(member))
                if kept is not None and kept.value is not None:
                    writes[kept.key] = (kept.value, lease.id)
                    unchanged.append(kept)
            revision = self._write_if_unchanged(unchanged, writes)
            if revision is None:
                self.revoke(lease.id)
                continue
            # The lease of a corrupt record may be that of another program.
            if found is not None and found.lease and current is not None:
                self.revoke(found.lease)
            order = record.registration_order
            return Registration(f"{lease.id:x}", int(lease.ttl), revision, order)
        raise _conflict(f"member {member.worker_id}")

    def has_member(self, lease: int) -> bool:
        """Whether a member's record is bound to the lease.

        False for a replaced incarnation's lease, and for a lease of another program.
        """
        members = self._key("members/").encode()
        try:
            keys = self._client.get_lease_info(lease).keys
        except grpc.RpcError as error:
            # The lease has keys that our user may not read.
            if code_of(error) is grpc.StatusCode.PERMISSION_DENIED:
                return False
            raise
        return any(key.startswith(members) for key in keys)

    def renew_all(self, leases: Collection[int]) -> Mapping[int, float]:
        """Renews leases on one stream. Returns the seconds to live of those that exist."""
        messages = load_etcd3().etcdrpc
        requests = [messages.LeaseKeepAliveRequest(ID=lease) for lease in leases]
        client = self._client
        responses = client.leasestub.LeaseKeepAlive(
            iter(requests),
            client.timeout,
            credentials=client.call_credentials,
            metadata=client.metadata,
        )
        return {response.ID: float(response.TTL) for response in responses if response.TTL > 0}

    def revoke(self, lease: int) -> None:
        """Ends a lease, if it exists."""
        try:
            self._client.revoke_lease(lease)
        except grpc.RpcError as error:
            if code_of(error) is not grpc.StatusCode.NOT_FOUND:
                raise

    def put_descriptor(
        self,
        lease: int,
        reference: registry_pb2.MemberRef,
        descriptor: layout_pb2.KvDescriptor,
    ) -> int:
        """As Store.put_descriptor."""
        for _ in range(_ATTEMPTS):
            found = self._read(_member_key(reference.worker_id))
            held = found is not None and found.lease == lease
            require_owner(_parse_member(found), held, f"{lease:x}", reference)
            revision = self._write_if_unchanged(
                [found] if found is not None else [],
                {_descriptor_key(reference): (descriptor.SerializeToString(), lease)},
            )
            if revision is not None:
                return revision
        raise _conflict(f"descriptor of {reference.worker_id}")

    def get_descriptor(self, reference: registry_pb2.MemberRef) -> layout_pb2.KvDescriptor | None:
        """The descriptor of one incarnation, or None."""
        found = self._read(_descriptor_key(reference))
        content = None if found is None else try_read(found)
        return content if isinstance(content, layout_pb2.KvDescriptor) else None

    def set_policy(self, policy: registry_pb2.Policy, expected_revision: int) -> int:
        """As Store.set_policy."""
        for _ in range(_ATTEMPTS):
            found = self._read("policy") or Record("policy", None, 0, 0)
            require_policy_revision(found.revision, expected_revision)
            revision = self._write_if_unchanged(
                [found], {"policy": (policy.SerializeToString(), 0)}
            )
            if revision is not None:
                return revision
        raise _conflict("policy")

    def ensure_prefix_hash_key(self, proposed: int) -> int:
        """As Store.ensure_prefix_hash_key."""
        name, chosen = "prefix_hash_key", proposed or new_prefix_hash_key()
        written = {name: (chosen.to_bytes(PREFIX_HASH_KEY_BYTES).hex().encode(), 0)}
        for _ in range(_ATTEMPTS):
            found = self._read(name) or Record(name, None, 0, 0)
            if found.value is not None:
                with contextlib.suppress(CorruptRecord):
                    return read_key(found.value)
            if self._write_if_unchanged([found], written) is not None:
                return chosen
        raise _conflict(name)

    def _parse(self, pairs: Iterable[Any]) -> Iterator[Record]:
        return (parse_record(self.prefix, pair) for pair in pairs)

    def _key(self, key: str) -> str:
        return self.prefix + key

    def _read(self, key: str) -> Record | None:
        return self._read_at(key)[0]

    def _read_at(self, key: str) -> tuple[Record | None, int]:
        """A record, and etcd's revision at that moment."""
        response = self._client.get_response(self._key(key))
        return next(self._parse(response.kvs), None), int(response.header.revision)

    def _write_if_unchanged(
        self, unchanged: Iterable[Record], writes: dict[str, tuple[bytes, int]]
    ) -> int | None:
        """Writes {key: (value, lease)} in one transaction and returns the revision.

        Returns None, and writes nothing, when a record of `unchanged` has changed.
        """
        operations = self._client.transactions
        succeeded, responses = self._client.transaction(
            compare=[
                operations.mod(self._key(record.key)) == record.revision for record in unchanged
            ],
            success=[
                operations.put(self._key(key), value, lease=lease)
                for key, (value, lease) in writes.items()
            ],
            failure=[],
        )
        return int(responses[0].response_put.header.revision) if succeeded else None


def parse_record(prefix: str, pair: Any, *, deleted: bool = False) -> Record:
    """The Record of an etcd KeyValue."""
    key = bytes(pair.key).decode("utf-8", errors="replace").removeprefix(prefix)
    return Record(key, None if deleted else pair.value, pair.lease, pair.mod_revision)


def _member_key(worker_id: str) -> str:
    return f"members/{worker_id}"


def _descriptor_key(reference: registry_pb2.MemberRef | registry_pb2.Member) -> str:
    return f"descriptors/{reference.worker_id}/{reference.incarnation}"


def _parse_member(record: Record | None) -> registry_pb2.Member | None:
    content = None if record is None else try_read(record)
    return content if isinstance(content, registry_pb2.Member) else None


def _conflict(what: str) -> Conflict:
    return Conflict(f"other writers keep changing the {what}: try again", metadata={"what": what})
