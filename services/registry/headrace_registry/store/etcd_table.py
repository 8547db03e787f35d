"""The registry's records in etcd: which keys there are, and how each is changed atomically.
Blocking.

    <prefix>members/<worker id>                     Member, bound to the member's lease
    <prefix>descriptors/<worker id>/<incarnation>   KvDescriptor, bound to the same lease
    <prefix>policy                                  Policy
    <prefix>prefix_hash_key                         the key, 16 hex digits, never changed
    <prefix>ticket_key                              the key, 64 hex digits, never changed

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
    require_newer,
    require_owner,
    require_policy_revision,
)

# Writers of one key are few; more losses in a row than this mean that something is wrong.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Record:
    """One key: `key` less the prefix, `lease` as etcd's number, `revision` of its last change;
    value None when deleted.
    """

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
    """The records under one prefix, through one etcd3 client. Holds no state; any thread may call.

    Lets etcd3's and gRPC's exceptions through: EtcdConnection turns them into RegistryUnavailable.
    """

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self.prefix = prefix

    def list(self) -> Listing:
        """Everything under the prefix, as etcd's leader has it."""
        response = self._client.get_prefix_response(self.prefix)
        return Listing(
            cluster_id=response.header.cluster_id,
            revision=response.header.revision,
            records=tuple(self.record(pair) for pair in response.kvs),
        )

    def revision(self) -> int:
        """etcd's current revision."""
        response = self._client.get_response(self._key("policy"))
        return int(response.header.revision)

    def record(self, pair: Any, *, deleted: bool = False) -> Record:
        """A Record of an etcd KeyValue."""
        key = bytes(pair.key).decode("utf-8", errors="replace").removeprefix(self.prefix)
        return Record(key, None if deleted else pair.value, pair.lease, pair.mod_revision)

    def register(self, member: registry_pb2.Member, ttl_s: int) -> Registration:
        """As Store.register."""
        for _ in range(_ATTEMPTS):
            found = self._read(_member_key(member.worker_id))
            current = _parse_member(found)
            require_newer(current, member)
            kept = self._kept_descriptor(current, member)
            lease = self._client.lease(ttl_s)
            revision = self._put_member(member, lease.id, found, kept)
            if revision is None:
                self.revoke(lease.id)
                continue
            if found is not None and found.lease:
                self.revoke(found.lease)
            return Registration(f"{lease.id:x}", int(lease.ttl), revision)
        raise _contended(f"member {member.worker_id}")

    def owns(self, lease: int) -> bool:
        """Whether a member hangs on the lease. Leases of an incarnation that was replaced, or of
        others, do not count.
        """
        members = self._key("members/").encode()
        return any(key.startswith(members) for key in self._client.get_lease_info(lease).keys)

    def refresh(self, lease: int) -> float | None:
        """Renews a lease: seconds to live, or None when it is gone."""
        responses = list(self._client.refresh_lease(lease))
        ttl_s = float(responses[0].TTL) if responses else 0.0
        return ttl_s if ttl_s > 0 else None

    def revoke(self, lease: int) -> None:
        """Ends a lease, if it is still there."""
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
            revision = self._commit(
                [found] if found is not None else [],
                {_descriptor_key(reference): (descriptor.SerializeToString(), lease)},
            )
            if revision is not None:
                return revision
        raise _contended(f"descriptor of {reference.worker_id}")

    def get_descriptor(self, reference: registry_pb2.MemberRef) -> layout_pb2.KvDescriptor | None:
        """The descriptor of one incarnation, if there is one."""
        found = self._read(_descriptor_key(reference))
        if found is None or found.value is None:
            return None
        return layout_pb2.KvDescriptor.FromString(found.value)

    def set_policy(self, policy: registry_pb2.Policy, expected_revision: int) -> int:
        """As Store.set_policy."""
        for _ in range(_ATTEMPTS):
            found = self._read("policy") or Record("policy", None, 0, 0)
            require_policy_revision(found.revision, expected_revision)
            revision = self._commit([found], {"policy": (policy.SerializeToString(), 0)})
            if revision is not None:
                return revision
        raise _contended("policy")

    def prefix_hash_key(self, proposed: int) -> int:
        """As Store.prefix_hash_key."""
        return int(
            self._once("prefix_hash_key", b"%016x" % (proposed or new_prefix_hash_key())), 16
        )

    def ticket_key(self, proposed: bytes) -> bytes:
        """As Store.ticket_key."""
        chosen = (proposed or new_ticket_key()).hex().encode()
        return bytes.fromhex(self._once("ticket_key", chosen).decode())

    def _once(self, key: str, proposed: bytes) -> bytes:
        """The value of a key that is written once; `proposed` where there is none yet."""
        for _ in range(_ATTEMPTS):
            found = self._read(key)
            if found is not None and found.value is not None:
                return found.value
            if self._commit([Record(key, None, 0, 0)], {key: (proposed, 0)}) is not None:
                return proposed
        raise _contended(key)

    def _key(self, key: str) -> str:
        return self.prefix + key

    def _read(self, key: str) -> Record | None:
        response = self._client.get_response(self._key(key))
        return self.record(response.kvs[0]) if response.kvs else None

    def _kept_descriptor(
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
        return self._commit(unchanged, writes)

    def _commit(
        self, unchanged: Iterable[Record], writes: dict[str, tuple[bytes, int]]
    ) -> int | None:
        """Writes {key: (value, lease)} unless a record changed meanwhile; the revision, None when
        one did.
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


def _contended(what: str) -> Conflict:
    return Conflict(
        f"the {what} keeps changing under the write: try again", metadata={"what": what}
    )
