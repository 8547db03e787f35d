"""A store in the memory of this process."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_registry.feed import ALL, ChangeFeed, PolicyRecord, WatchFilter
from headrace_registry.store.base import (
    Registration,
    Store,
    descriptor_missing,
    new_prefix_hash_key,
    registered,
    require_owner,
    require_policy_revision,
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

    def put_descriptor(self, descriptor: layout_pb2.KvDescriptor) -> None:
        self.descriptor = descriptor

    def restart_timer(self, on_timer: Callable[[str], None]) -> None:
        """Has `on_timer` called with the lease id when the lease expires. The last timer has fired."""
        loop = asyncio.get_running_loop()
        self.timer = loop.call_at(self.expires_at_s, on_timer, self.lease_id)


class MemoryStore(Store):
    """Leases with timers on the event loop on which the store was made.

    Revisions start at the start time in microseconds. So the revision of a watcher from before a
    restart has expired.
    """

    def __init__(self, history_size: int) -> None:
        super().__init__(ChangeFeed(history_size, revision=time.time_ns() // 1000))
        self._leases: dict[str, _Lease] = {}
        self._lease_ids: dict[str, str] = {}
        self._prefix_hash_key = 0

    async def start(self) -> None:
        """Does nothing: there is no remote store."""

    async def close(self) -> None:
        for lease in self._leases.values():
            lease.timer.cancel()

    async def register(self, member: registry_pb2.Member, ttl_s: int) -> Registration:
        member = registered(self.members.get(member.worker_id), member, self.revision)
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
        revision = self._feed.revision + 1
        self._feed.apply(revision, {member.worker_id: member})
        return Registration(lease_id, ttl_s, revision, member.registration_order)

    async def keep_alive(self, lease_id: str) -> float | None:
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        lease.renew(asyncio.get_running_loop().time())
        return float(lease.ttl_s)

    async def deregister(self, lease_id: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._end_lease(lease)

    async def put_descriptor(
        self,
        lease_id: str,
        reference: registry_pb2.MemberRef,
        descriptor: layout_pb2.KvDescriptor,
    ) -> int:
        held_id = self._lease_ids.get(reference.worker_id, "")
        current = self.members.get(reference.worker_id)
        require_owner(current, held_id == lease_id, lease_id, reference)
        self._leases[held_id].put_descriptor(descriptor)
        revision = self._feed.revision + 1
        self._feed.apply(revision, {})
        return revision

    async def get_descriptor(self, reference: registry_pb2.MemberRef) -> layout_pb2.KvDescriptor:
        lease = self._leases.get(self._lease_ids.get(reference.worker_id, ""))
        if (
            lease is None
            or lease.descriptor is None
            or lease.member.incarnation != reference.incarnation
        ):
            raise descriptor_missing(reference)
        return lease.descriptor

    async def set_policy(self, policy: registry_pb2.Policy, expected_revision: int) -> int:
        require_policy_revision(self.policy.revision, expected_revision)
        revision = self._feed.revision + 1
        self._feed.apply(revision, {}, PolicyRecord(policy, revision))
        return revision

    async def ensure_prefix_hash_key(self, proposed: int) -> int:
        self._prefix_hash_key = self._prefix_hash_key or proposed or new_prefix_hash_key()
        return self._prefix_hash_key

    def watch(
        self, start_revision: int, wanted: WatchFilter = ALL
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        return self._feed.watch(start_revision, wanted)

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
        self._feed.apply(self._feed.revision + 1, {lease.member.worker_id: None})
