"""What every store of the registry does, wherever it keeps its records."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import Conflict, NotFound, StaleIncarnation
from headrace_registry.feed import ChangeFeed, PolicyRecord

TICKET_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Registration:
    """A granted lease. `ttl_s` is whole seconds from the grant, `revision` that of the change."""

    lease_id: str
    ttl_s: int
    revision: int


class Store(ABC):
    """Leases and all that hangs on them. Messages handed in or out are never changed afterwards.

    Reads come from `feed`, this process's copy, so they go on while a remote store is away. Writes
    and lease calls then raise RegistryUnavailable within seconds.
    """

    def __init__(self, feed: ChangeFeed) -> None:
        self.feed = feed

    @property
    def members(self) -> Mapping[str, registry_pb2.Member]:
        """Live members by worker id."""
        return self.feed.members

    @property
    def policy(self) -> PolicyRecord:
        return self.feed.policy

    @abstractmethod
    async def start(self) -> None:
        """Makes the store ready. Raises ConfigError when it cannot be reached."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of threads, timers and connections; leases are left to run."""

    @abstractmethod
    async def register(self, member: registry_pb2.Member, ttl_s: int) -> Registration:
        """Grants a lease of whole seconds. Raises Conflict when a newer incarnation is registered.

        The same incarnation gets a new lease in place of its old one, and keeps its descriptor.
        """

    @abstractmethod
    async def keep_alive(self, lease_id: str) -> float | None:
        """Renews a lease: seconds to live from now, or None when the lease is gone."""

    @abstractmethod
    async def deregister(self, lease_id: str) -> None:
        """Ends a lease and all that hangs on it. A lease that is gone already is no error."""

    @abstractmethod
    async def put_descriptor(
        self,
        lease_id: str,
        reference: registry_pb2.MemberRef,
        descriptor: layout_pb2.KvDescriptor,
    ) -> int:
        """Binds a descriptor to a lease; the revision. Raises NotFound or StaleIncarnation."""

    @abstractmethod
    async def get_descriptor(self, reference: registry_pb2.MemberRef) -> layout_pb2.KvDescriptor:
        """The descriptor of one incarnation. Raises NotFound."""

    @abstractmethod
    async def set_policy(self, policy: registry_pb2.Policy, expected_revision: int) -> int:
        """Replaces the policy; the revision. Raises Conflict unless `expected_revision` is current
        or 0.
        """

    @abstractmethod
    async def prefix_hash_key(self, proposed: int) -> int:
        """The deployment's key for prefix hashes; where there is none yet, `proposed` or, for 0, a new one."""

    @abstractmethod
    async def ticket_key(self, proposed: bytes) -> bytes:
        """The same of the deployment's key for tickets, of TICKET_KEY_BYTES."""

    @abstractmethod
    def watch(self, start_revision: int) -> AsyncIterator[registry_pb2.WatchResponse]:
        """As ChangeFeed.watch."""


def new_prefix_hash_key() -> int:
    """A random key of 64 bits, never 0."""
    return 1 + secrets.randbelow((1 << 64) - 1)


def new_ticket_key() -> bytes:
    """A random key of TICKET_KEY_BYTES."""
    return secrets.token_bytes(TICKET_KEY_BYTES)


def require_newer(current: registry_pb2.Member | None, member: registry_pb2.Member) -> None:
    """Raises Conflict when `current` is a newer incarnation of the same worker than `member`."""
    if current is None or current.incarnation == member.incarnation:
        return
    if (current.start_unix_ns, current.incarnation) > (member.start_unix_ns, member.incarnation):
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
    """Raises unless `current`, the worker's record, is of the incarnation referred to and `held` by
    the lease.
    """
    if current is None or not held:
        raise NotFound(
            f"lease {lease_id} of {reference.worker_id} is gone: register again",
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
    """The error for an incarnation that is gone or has published no descriptor."""
    return NotFound(
        f"{reference.worker_id}@{reference.incarnation} is gone or has published no KV descriptor",
        metadata={"worker_id": reference.worker_id, "incarnation": reference.incarnation},
    )


def require_policy_revision(current: int, expected: int) -> None:
    """Raises Conflict unless `expected` is the policy's current revision, or 0 for whichever."""
    if expected not in (0, current):
        raise Conflict(
            f"the policy is at revision {current}, not {expected}: read it again",
            metadata={"revision": str(current), "expected_revision": str(expected)},
        )
