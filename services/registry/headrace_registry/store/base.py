"""The rules that all stores apply, and the store in the memory of one process."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

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


# A timer that fires later than this was delayed by this process, which could not receive renewals meanwhile.
_STALL_S: Final = 0.5


@dataclass(slots=True)
class _Lease:
    lease_id: str
    ttl_s: int
    # On the event loop's clock.
    expires_at_s: float
    member: registry_pb2.Member
    descriptor: layout_pb2.KvDescriptor | None
    timer: asyncio.TimerHandle

    def renew(self, now_s: float) -> None:
        """Starts the time to live again."""
        self.expires_at_s = now_s + self.ttl_s

    def restart_timer(self, on_timer: Callable[[str], None]) -> None:
        """Has `on_timer` called with the lease id when the lease expires. The last timer has fired."""
        loop = asyncio.get_running_loop()
        self.timer = loop.call_at(self.expires_at_s, on_timer, self.lease_id)


class MemoryStore:
    """Leases, with the records bound to them, and the policy. Its methods are those of every store.

    Messages passed in or out are never changed afterwards. Reads use this process's copy, the feed,
    so they work during an outage of a remote store. Writes and lease calls then raise
    RegistryUnavailable within seconds. Only stores write to the feed.

    Here, leases have timers on the event loop on which the store was made. Revisions start at the start time in
    microseconds. So the revision of a watcher from before a restart has expired.
    """

    corrupt_record_count = 0
    """Stored records that cannot be read and are skipped."""

    def __init__(self, history_size: int) -> None:
        self.feed = ChangeFeed(history_size, revision=time.time_ns() // 1000)
        """This process's copy."""
        self._leases: dict[str, _Lease] = {}
        self._lease_ids: dict[str, str] = {}
        self._prefix_hash_key = 0

    async def start(self) -> None:
        """Connects and reads all records. Raises ConfigError when the store cannot be reached."""

    async def close(self) -> None:
        """Releases threads, timers and connections. Leases in a remote store continue."""
        for lease in self._leases.values():
            lease.timer.cancel()

    async def register(self, member: registry_pb2.Member, ttl_s: int) -> Registration:
        """Grants a lease. Raises Conflict when a newer incarnation is registered. See `registered`.

        If the same incarnation is registered, a new lease replaces its lease and it keeps its
        descriptor.
        """
        member = registered(self.feed.members.get(member.worker_id), member, self.feed.revision)
        previous = self._leases.get(self._lease_ids.get(member.worker_id, ""))
        descriptor = None
        if previous is not None:
            self._remove_lease(previous)
            if previous.member.incarnation == member.incarnation:
                descriptor = previous.descriptor
        loop = asyncio.get_running_loop()
        lease_id = secrets.token_hex(8)
        expires_at_s = loop.time() + ttl_s
        timer = loop.call_at(expires_at_s, self._on_timer, lease_id)
        self._leases[lease_id] = _Lease(lease_id, ttl_s, expires_at_s, member, descriptor, timer)
        self._lease_ids[member.worker_id] = lease_id
        revision = self.feed.revision + 1
        self.feed.apply(revision, {member.worker_id: member})
        return Registration(lease_id, ttl_s, revision, member.registration_order)

    async def keep_alive(self, lease_id: str) -> float | None:
        """Renews a lease. Returns its seconds to live, or None when the lease does not exist."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        lease.renew(asyncio.get_running_loop().time())
        return float(lease.ttl_s)

    async def deregister(self, lease_id: str) -> None:
        """Ends a lease and removes its records. Does nothing when the lease does not exist."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._end_lease(lease)

    async def put_descriptor(
        self,
        lease_id: str,
        reference: registry_pb2.MemberRef,
        descriptor: layout_pb2.KvDescriptor,
    ) -> int:
        """Binds a descriptor to a lease and returns the revision. Raises as require_owner does."""
        held_id = self._lease_ids.get(reference.worker_id, "")
        current = self.feed.members.get(reference.worker_id)
        require_owner(current, held_id == lease_id, lease_id, reference)
        self._leases[held_id].descriptor = descriptor
        revision = self.feed.revision + 1
        self.feed.apply(revision, {})
        return revision

    async def get_descriptor(self, reference: registry_pb2.MemberRef) -> layout_pb2.KvDescriptor:
        """The descriptor of one incarnation. Raises NotFound."""
        lease = self._leases.get(self._lease_ids.get(reference.worker_id, ""))
        if (
            lease is None
            or lease.descriptor is None
            or lease.member.incarnation != reference.incarnation
        ):
            raise descriptor_missing(reference)
        return lease.descriptor

    async def set_policy(self, policy: registry_pb2.Policy, expected_revision: int) -> int:
        """Replaces the policy and returns the revision. Raises as require_policy_revision does."""
        require_policy_revision(self.feed.policy.revision, expected_revision)
        revision = self.feed.revision + 1
        self.feed.apply(revision, {}, PolicyRecord(policy, revision))
        return revision

    async def ensure_prefix_hash_key(self, proposed: int) -> int:
        """The deployment's key for prefix hashes.

        Without a stored key, stores `proposed` or, when that is 0, a random one.
        """
        self._prefix_hash_key = self._prefix_hash_key or proposed or new_prefix_hash_key()
        return self._prefix_hash_key

    def watch(
        self, start_revision: int, wanted: WatchFilter = ALL
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        """As ChangeFeed.watch. A remote store also accepts starts that this copy has not reached."""
        return self.feed.watch(start_revision, wanted)

    def _on_timer(self, lease_id: str) -> None:
        lease = self._leases[lease_id]
        now_s = asyncio.get_running_loop().time()
        if now_s - lease.expires_at_s > _STALL_S:
            lease.renew(now_s)
        if lease.expires_at_s > now_s:
            lease.restart_timer(self._on_timer)
        else:
            self._end_lease(lease)

    def _remove_lease(self, lease: _Lease) -> None:
        lease.timer.cancel()
        del self._leases[lease.lease_id]
        del self._lease_ids[lease.member.worker_id]

    def _end_lease(self, lease: _Lease) -> None:
        self._remove_lease(lease)
        self.feed.apply(self.feed.revision + 1, {lease.member.worker_id: None})
