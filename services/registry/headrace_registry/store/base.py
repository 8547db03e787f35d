"""The interface of a store, and the rules that all stores apply."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import Conflict, NotFound, StaleIncarnation
from headrace_registry.feed import ALL, ChangeFeed, PolicyRecord, WatchFilter


@dataclass(frozen=True, slots=True)
class Registration:
    """A granted lease of `ttl_s` seconds.

    `revision` is the revision of the member's record, and `order` its registration order.
    """

    lease_id: str
    ttl_s: int
    revision: int
    order: int


class Store(ABC):
    """Leases, with the records bound to them, and the policy.

    Messages passed in or out are never changed afterwards. Reads use this process's copy, the feed,
    so they work during an outage of a remote store. Writes and lease calls then raise
    RegistryUnavailable within seconds. Subclasses write to the feed.
    """

    def __init__(self, feed: ChangeFeed) -> None:
        self._feed = feed

    @property
    def members(self) -> Mapping[str, registry_pb2.Member]:
        """Live members by worker id."""
        return self._feed.members

    def member_count(self, role: registry_pb2.Member.Role.ValueType) -> int:
        """The number of live members of a role."""
        return self._feed.member_count(role)

    @property
    def revision(self) -> int:
        """Revision of this process's copy."""
        return self._feed.revision

    @property
    def policy(self) -> PolicyRecord:
        return self._feed.policy

    @property
    def corrupt_record_count(self) -> int:
        """Stored records that cannot be read and are skipped."""
        return 0

    @abstractmethod
    async def start(self) -> None:
        """Connects and reads all records. Raises ConfigError when the store cannot be reached."""

    @abstractmethod
    async def close(self) -> None:
        """Releases threads, timers and connections. Leases continue."""

    @abstractmethod
    async def register(self, member: registry_pb2.Member, ttl_s: int) -> Registration:
        """Grants a lease. Raises Conflict when a newer incarnation is registered. See `registered`.

        If the same incarnation is registered, a new lease replaces its lease and it keeps its
        descriptor.
        """

    @abstractmethod
    async def keep_alive(self, lease_id: str) -> float | None:
        """Renews a lease. Returns its seconds to live, or None when the lease does not exist."""

    @abstractmethod
    async def deregister(self, lease_id: str) -> None:
        """Ends a lease and removes its records. Does nothing when the lease does not exist."""

    @abstractmethod
    async def put_descriptor(
        self,
        lease_id: str,
        reference: registry_pb2.MemberRef,
        descriptor: layout_pb2.KvDescriptor,
    ) -> int:
        """Binds a descriptor to a lease and returns the revision.

        Raises as require_owner does.
        """

    @abstractmethod
    async def get_descriptor(self, reference: registry_pb2.MemberRef) -> layout_pb2.KvDescriptor:
        """The descriptor of one incarnation. Raises NotFound."""

    @abstractmethod
    async def set_policy(self, policy: registry_pb2.Policy, expected_revision: int) -> int:
        """Replaces the policy and returns the revision. Raises as require_policy_revision does."""

    @abstractmethod
    async def ensure_prefix_hash_key(self, proposed: int) -> int:
        """The deployment's key for prefix hashes.

        Without a stored key, stores `proposed` or, when that is 0, a random one.
        """

    @abstractmethod
    def watch(
        self, start_revision: int, wanted: WatchFilter = ALL
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        """As ChangeFeed.watch. A remote store also accepts starts that this copy has not reached."""


def new_prefix_hash_key() -> int:
    """A random key of 64 bits, never 0."""
    return 1 + secrets.randbelow((1 << 64) - 1)


def registered(
    current: registry_pb2.Member | None, member: registry_pb2.Member, revision: int
) -> registry_pb2.Member:
    """The record of `member`, with the order of its incarnation among those of its worker.

    The first registration of an incarnation makes it the newest one, whatever the clocks of hosts show: its order is
    above `revision`, the store's current one. `current` is the worker's record. An order above the revision was granted
    by no store with these records, so it counts as none: no member can place itself in the future.
    """
    record = registry_pb2.Member()
    record.CopyFrom(member)
    same = current is not None and current.incarnation == member.incarnation
    if current is not None and same:
        record.registration_order = current.registration_order
    elif not 0 < member.registration_order <= revision:
        record.registration_order = revision + 1
    require_newer(current, record)
    return record


def require_newer(current: registry_pb2.Member | None, member: registry_pb2.Member) -> None:
    """Raises Conflict when `current` is a newer incarnation of the same worker than `member`."""
    if current is None or current.incarnation == member.incarnation:
        return
    if current.registration_order >= member.registration_order:
        raise Conflict(
            f"worker {member.worker_id} is registered with a newer incarnation, "
            f"{current.incarnation}: give this process another worker id, or stop one of the two",
            metadata={
                "worker_id": member.worker_id,
                "incarnation": member.incarnation,
                "registered_incarnation": current.incarnation,
            },
        )


def require_owner(
    current: registry_pb2.Member | None,
    held: bool,
    lease_id: str,
    reference: registry_pb2.MemberRef,
) -> None:
    """Checks that a lease owns an incarnation. `current` is the worker's record, `held` whether the lease holds it.

    Raises NotFound when it does not, StaleIncarnation when the record is of another incarnation.
    """
    if current is None or not held:
        raise NotFound(
            f"lease {lease_id} of {reference.worker_id} does not exist: register again",
            metadata={"lease_id": lease_id, "worker_id": reference.worker_id},
        )
    if current.incarnation != reference.incarnation:
        raise StaleIncarnation(
            f"lease {lease_id} belongs to {current.worker_id}@{current.incarnation}, "
            f"not to {reference.worker_id}@{reference.incarnation}",
            metadata={
                "lease_id": lease_id,
                "worker_id": reference.worker_id,
                "incarnation": reference.incarnation,
            },
        )


def descriptor_missing(reference: registry_pb2.MemberRef) -> NotFound:
    """The error for an incarnation that is not registered or has published no descriptor."""
    return NotFound(
        f"{reference.worker_id}@{reference.incarnation} is not registered or has published no KV descriptor",
        metadata={"worker_id": reference.worker_id, "incarnation": reference.incarnation},
    )


def require_policy_revision(current: int, expected: int) -> None:
    """Raises Conflict unless `expected` is 0 or the policy's current revision."""
    if expected not in (0, current):
        raise Conflict(
            f"the policy is at revision {current}, not {expected}: read it again",
            metadata={"revision": str(current), "expected_revision": str(expected)},
        )
