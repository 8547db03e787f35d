"""The registry's records in etcd: their keys, and atomic changes of them. Blocking.

- `<prefix>members/<worker id>`: Member, bound to the member's lease
- `<prefix>descriptors/<worker id>/<incarnation>`: KvDescriptor, bound to the same lease
- `<prefix>policy`: Policy
- `<prefix>prefix_hash_key`: 16 hex digits, written once
- `<prefix>ticket_key`: 64 hex digits, written once

Revisions are etcd's own, so all registries over one etcd agree on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import Conflict
from headrace_registry.store.base import (
    Registration,
    new_prefix_hash_key,
    new_ticket_key,
    registered,
    require_owner,
    require_policy_revision,
)

# One key has few writers. More conflicts in a row than this have another cause.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Record:
    """The value of one key; None when deleted. `key` is without the prefix, `revision` of the last change."""

    key: str
    value: bytes | None
    lease: int
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Every record at one revision of one etcd cluster."""

    cluster_id: int
    revision: int
    records: tuple[Record, ...]


class EtcdTable:
    """The records under one prefix, through one etcd3 client. Has no state; any thread may call it.

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
            records=tuple(self.parse_record(pair) for pair in response.kvs),
        )

    def current_revision(self) -> int:
        """etcd's current revision."""
        response = self._client.get_response(self._key("policy"))
        return int(response.header.revision)

    def parse_record(self, pair: Any, *, deleted: bool = False) -> Record:
        """The Record of an etcd KeyValue."""
        key = bytes(pair.key).decode("utf-8", errors="replace").removeprefix(self.prefix)
        return Record(key, None if deleted else pair.value, pair.lease, pair.mod_revision)

    def register(self, member: registry_pb2.Member, ttl_s: int) -> Registration:
        """As Store.register."""
        for _ in range(_ATTEMPTS):
            found, revision_read = self._read_at(_member_key(member.worker_id))
            current = _parse_member(found)
            record = registered(current, member, revision_read)
            kept = self._descriptor_of_same_incarnation(current, member)
            lease = self._client.lease(ttl_s)
            revision = self._put_member(record, lease.id, found, kept)
            if revision is None:
                self.revoke(lease.id)
                continue
            if found is not None and found.lease:
                self.revoke(found.lease)
            order = record.registration_order
            return Registration(f"{lease.id:x}", int(lease.ttl), revision, order)
        raise _conflict(f"member {member.worker_id}")

    def has_member(self, lease: int) -> bool:
        """Whether a member's record is bound to the lease.

        False for a replaced incarnation's lease, and for a lease of another program.
        """
        members = self._key("members/").encode()
        return any(key.startswith(members) for key in self._client.get_lease_info(lease).keys)

    def renew(self, lease: int) -> float | None:
        """Renews a lease. Returns its seconds to live, or None when it does not exist."""
        responses = list(self._client.refresh_lease(lease))
        ttl_s = float(responses[0].TTL) if responses else 0.0
        return ttl_s if ttl_s > 0 else None

    def revoke(self, lease: int) -> None:
        """Ends a lease, if it exists."""
        try:
            self._client.revoke_lease(lease)
        except grpc.RpcError as error:
            if not _is_not_found(error):
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
        if found is None or found.value is None:
            return None
        return layout_pb2.KvDescriptor.FromString(found.value)

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
        return int(
            self._write_once("prefix_hash_key", b"%016x" % (proposed or new_prefix_hash_key())), 16
        )

    def ensure_ticket_key(self, proposed: bytes) -> bytes:
        """As Store.ensure_ticket_key."""
        chosen = (proposed or new_ticket_key()).hex().encode()
        return bytes.fromhex(self._write_once("ticket_key", chosen).decode())

    def _write_once(self, key: str, proposed: bytes) -> bytes:
        """The value of a key. Writes `proposed` when the key has none."""
        for _ in range(_ATTEMPTS):
            found = self._read(key)
            if found is not None and found.value is not None:
                return found.value
            if (
                self._write_if_unchanged([Record(key, None, 0, 0)], {key: (proposed, 0)})
                is not None
            ):
                return proposed
        raise _conflict(key)

    def _key(self, key: str) -> str:
        return self.prefix + key

    def _read(self, key: str) -> Record | None:
        return self._read_at(key)[0]

    def _read_at(self, key: str) -> tuple[Record | None, int]:
        """A record, and etcd's revision at that moment."""
        response = self._client.get_response(self._key(key))
        found = self.parse_record(response.kvs[0]) if response.kvs else None
        return found, int(response.header.revision)

    def _descriptor_of_same_incarnation(
        self, current: registry_pb2.Member | None, member: registry_pb2.Member
    ) -> Record | None:
        if current is None or current.incarnation != member.incarnation:
            return None
        reference = registry_pb2.MemberRef(
            worker_id=member.worker_id, incarnation=member.incarnation
        )
        return self._read(_descriptor_key(reference))

    def _put_member(
        self,
        member: registry_pb2.Member,
        lease: int,
        found: Record | None,
        kept: Record | None,
    ) -> int | None:
        key = _member_key(member.worker_id)
        writes = {key: (member.SerializeToString(), lease)}
        unchanged = [found or Record(key, None, 0, 0)]
        if kept is not None and kept.value is not None:
            writes[kept.key] = (kept.value, lease)
            unchanged.append(kept)
        return self._write_if_unchanged(unchanged, writes)

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


def _member_key(worker_id: str) -> str:
    return f"members/{worker_id}"


def _descriptor_key(reference: registry_pb2.MemberRef) -> str:
    return f"descriptors/{reference.worker_id}/{reference.incarnation}"


def _parse_member(record: Record | None) -> registry_pb2.Member | None:
    if record is None or record.value is None:
        return None
    return registry_pb2.Member.FromString(record.value)


def _is_not_found(error: grpc.RpcError) -> bool:
    code = getattr(error, "code", None)
    return code is not None and code() == grpc.StatusCode.NOT_FOUND


def _conflict(what: str) -> Conflict:
    return Conflict(f"other writers keep changing the {what}: try again", metadata={"what": what})
