"""A store in etcd, which several registries may share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeVar

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import ConfigError, RegistryUnavailable, WatchExpired
from headrace_common.registry.view import default_policy
from headrace_common.tasks import end_task, run_forever
from headrace_registry.feed import ALL, ChangeFeed, PolicyRecord, WatchFilter
from headrace_registry.store.base import Registration, descriptor_missing
from headrace_registry.store.etcd_connection import EtcdConnection
from headrace_registry.store.etcd_endpoint import EtcdAccess
from headrace_registry.store.etcd_table import (
    Content,
    CorruptRecord,
    CorruptRecords,
    EtcdTable,
    Listing,
    Record,
    parse_record,
    try_read,
)


class MemberLeases:
    """Each member has one lease, and each lease one member. A lookup takes the same time for any number of them."""

    def __init__(self) -> None:
        self._by_worker: dict[str, int] = {}
        self._by_lease: dict[int, str] = {}

    def put(self, worker_id: str, lease: int) -> None:
        """Sets the lease of a member. 0 means none."""
        self.pop(worker_id)
        if lease:
            self._by_worker[worker_id] = lease
            self._by_lease[lease] = worker_id

    def pop(self, worker_id: str) -> int:
        """Removes a member. Returns its lease, 0 for an unknown member."""
        lease = self._by_worker.pop(worker_id, 0)
        if self._by_lease.get(lease) == worker_id:
            del self._by_lease[lease]
        return lease

    def worker_of(self, lease: int) -> str | None:
        """The member with a lease."""
        return self._by_lease.get(lease)

    def take_all(self) -> Mapping[str, int]:
        """Removes all members. Returns their leases by worker id."""
        taken, self._by_worker, self._by_lease = self._by_worker, {}, {}
        return taken


# A renewal may wait that long for others. It is short beside the shortest time to live.
_COLLECT_S: Final = 0.02
_LEASES_PER_CALL: Final = 512

RenewAll = Callable[[Collection[int]], Awaitable[Mapping[int, float]]]
"""Renews leases. Returns the seconds to live of those that exist. Raises HeadraceError."""


class BatchedRenewals:
    """One event loop owns it. A call costs about 1 ms of CPU, however many leases it renews."""

    def __init__(self, renew_all: RenewAll) -> None:
        self._renew_all = renew_all
        self._waiting: dict[int, asyncio.Future[float | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def renew(self, lease: int) -> float | None:
        """Renews a lease. Returns its seconds to live, or None when it does not exist. Raises as the call does."""
        future = self._waiting.get(lease)
        if future is None:
            future = self._waiting[lease] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="etcd-renewals")
        # Another caller may wait for the same lease.
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Ends the renewals that wait."""
        await end_task(self._task)
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(_COLLECT_S)
            leases = list(self._waiting)[:_LEASES_PER_CALL]
            batch = {lease: self._waiting.pop(lease) for lease in leases}
            try:
                left_s = await self._renew_all(batch.keys())
            except Exception as error:  # noqa: BLE001 - each caller raises it
                for future in batch.values():
                    future.set_exception(error)
                    # A caller that was cancelled does not read it.
                    future.exception()
            else:
                for lease, future in batch.items():
                    future.set_result(left_s.get(lease))


_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_RETRY_S: Final = (0.1, 0.2, 0.4, 0.8, 1.0)
_READ_OWN_WRITE_S: Final = 1.0


class EtcdStore:
    """As MemoryStore, with the records in etcd and this process's copy of them. Used by one event loop.

    One task follows etcd. It lists the records, then watches from the listing's revision. When the
    watch breaks, the task lists again and applies the differences. During an outage of etcd the copy
    does not change.
    """

    def __init__(
        self, access: EtcdAccess, *, prefix: str, history_size: int, start_timeout_s: float
    ) -> None:
        """Raises ConfigError when etcd3 is missing or a file cannot be read."""
        self.feed = ChangeFeed(history_size)
        self._connection = EtcdConnection(access)
        self._prefix = prefix
        self._timeout_s = access.timeout_s
        self._start_timeout_s = start_timeout_s
        self._cluster_id: int | None = None
        self._leases = MemberLeases()
        self._descriptors: dict[str, layout_pb2.KvDescriptor] = {}
        self._corrupt = CorruptRecords()
        self._renewals = BatchedRenewals(
            lambda leases: self._call(lambda table: table.renew_all(leases))
        )
        self._follower: asyncio.Task[None] | None = None
        self._failure_count = 0

    @property
    def corrupt_record_count(self) -> int:
        return len(self._corrupt)

    async def start(self) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._start_timeout_s
        while True:
            try:
                self._load(await self._call(EtcdTable.list_records))
                break
            except RegistryUnavailable as error:
                if asyncio.get_running_loop().time() >= deadline_s:
                    self._connection.close()
                    raise ConfigError(
                        f"store: {error.detail} Correct this, or give --store memory",
                        metadata=error.metadata,
                    ) from error
            await asyncio.sleep(_RETRY_S[1])
        self._follower = run_forever(self._follow, "etcd-follower")

    async def close(self) -> None:
        await end_task(self._follower)
        await self._renewals.close()
        self._connection.close()

    async def register(self, member: registry_pb2.Member, ttl_s: int) -> Registration:
        registration = await self._call(lambda table: table.register(member, ttl_s))
        await self.feed.wait_for_revision(registration.revision, _READ_OWN_WRITE_S)
        return registration

    async def keep_alive(self, lease_id: str) -> float | None:
        lease = _parse_lease(lease_id)
        if lease is None or not await self._has_member(lease):
            return None
        return await self._renewals.renew(lease)

    async def deregister(self, lease_id: str) -> None:
        lease = _parse_lease(lease_id)
        if lease is None or not await self._has_member(lease):
            return
        worker_id = self._leases.worker_of(lease)
        await self._call(lambda table: table.revoke(lease))
        # etcd3 does not return the revision of a revocation, so this waits for the change itself.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_OWN_WRITE_S):
                while worker_id is not None and self._leases.worker_of(lease) == worker_id:
                    await self.feed.wait_for_revision(self.feed.revision + 1, _READ_OWN_WRITE_S)

    async def put_descriptor(
        self,
        lease_id: str,
        reference: registry_pb2.MemberRef,
        descriptor: layout_pb2.KvDescriptor,
    ) -> int:
        lease = _parse_lease(lease_id) or 0
        revision = await self._call(
            lambda table: table.put_descriptor(lease, reference, descriptor)
        )
        await self.feed.wait_for_revision(revision, _READ_OWN_WRITE_S)
        return revision

    async def get_descriptor(self, reference: registry_pb2.MemberRef) -> layout_pb2.KvDescriptor:
        known = self._descriptors.get(f"{reference.worker_id}/{reference.incarnation}")
        if known is not None:
            return known
        # Another registry may have written it a moment ago.
        found = await self._call(lambda table: table.get_descriptor(reference))
        if found is None:
            raise descriptor_missing(reference)
        return found

    async def set_policy(self, policy: registry_pb2.Policy, expected_revision: int) -> int:
        # When a response was lost, the policy may have the new revision, so a second try would be a conflict.
        revision = await self._call(
            lambda table: table.set_policy(policy, expected_revision),
            repeatable=expected_revision == 0,
        )
        await self.feed.wait_for_revision(revision, _READ_OWN_WRITE_S)
        return revision

    async def ensure_prefix_hash_key(self, proposed: int) -> int:
        return await self._call(lambda table: table.ensure_prefix_hash_key(proposed))

    async def watch(
        self, start_revision: int, wanted: WatchFilter = ALL
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        if start_revision > self.feed.revision:
            # The revision may come from another registry, ahead of this one. One ahead of etcd comes from another etcd.
            current = await self._call(EtcdTable.current_revision)
            if start_revision > current:
                raise WatchExpired(
                    f"this registry has no revision {start_revision}: watch again from 0",
                    metadata={"start_revision": str(start_revision), "revision": str(current)},
                )
        async for response in self.feed.watch(start_revision, wanted, allow_future=True):
            yield response

    async def _call(self, function: Callable[[EtcdTable], _T], *, repeatable: bool = True) -> _T:
        """As EtcdConnection.call, with the records."""
        return await self._connection.call(
            lambda client: function(EtcdTable(client, self._prefix)), repeatable=repeatable
        )

    async def _has_member(self, lease: int) -> bool:
        if self._leases.worker_of(lease) is not None:
            return True
        return await self._call(lambda table: table.has_member(lease))

    async def _follow(self) -> None:
        while True:
            try:
                self._load(await self._call(EtcdTable.list_records))
                await self._follow_watch()
            except RegistryUnavailable as error:
                if self._failure_count == 0:
                    _log.warning("serving the last copy of the records: %s", error.detail)
            delay_s = _RETRY_S[min(self._failure_count, len(_RETRY_S) - 1)]
            self._failure_count += 1
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def _follow_watch(self) -> None:
        watch = self._connection.watch(self._prefix, self.feed.revision + 1)
        try:
            async for response in watch.responses(self._timeout_s):
                if response.canceled or response.compact_revision:
                    raise RegistryUnavailable(
                        f"etcd cancelled the watch: {response.cancel_reason or 'compacted'}"
                    )
                if self._failure_count:
                    _log.info("following etcd at %s again", self._connection.endpoint.name)
                self._failure_count = 0
                self._apply_events(response.events)
        finally:
            watch.close()

    def _load(self, listing: Listing) -> None:
        before = self._leases.take_all()
        self._descriptors.clear()
        self._corrupt.keep_only(frozenset(record.key for record, _ in listing.records))
        found, policy = self._read_records(listing.records)
        members = {name: member for name, member in found.items() if member is not None}
        policy = policy or PolicyRecord(default_policy(), 0)
        if listing.cluster_id == self._cluster_id and listing.revision >= self.feed.revision:
            self.feed.apply_listing(listing.revision, members, policy)
        else:
            self._report_loss(listing, before.keys() - found.keys())
            self.feed.restart(listing.revision, members, policy)
        self._cluster_id = listing.cluster_id

    def _report_loss(self, listing: Listing, removed: Collection[str]) -> None:
        if self._cluster_id is None:
            return
        other = listing.cluster_id != self._cluster_id
        _log.error(
            "etcd at %s has lost data: %s. %d members are missing and register again. Every watch starts again",
            self._connection.name,
            f"it is another cluster, {listing.cluster_id:x} instead of {self._cluster_id:x}"
            if other
            else f"its revision went back from {self.feed.revision} to {listing.revision}",
            len(removed),
        )

    def _apply_events(self, events: Any) -> None:
        """Applies the events of one watch response, revision by revision."""
        by_revision: dict[int, list[Record]] = {}
        for event in events:
            record = parse_record(self._prefix, event.kv, deleted=event.type != 0)
            by_revision.setdefault(record.revision, []).append(record)
        for revision, records in by_revision.items():
            members, policy = self._read_records((one, try_read(one)) for one in records)
            self.feed.apply(revision, members, policy)

    def _read_records(
        self, records: Iterable[tuple[Record, Content | CorruptRecord | None]]
    ) -> tuple[dict[str, registry_pb2.Member | None], PolicyRecord | None]:
        """Replaces leases and descriptors. Returns the members, None for a removed or corrupt one, and the policy."""
        members: dict[str, registry_pb2.Member | None] = {}
        policy: PolicyRecord | None = None
        for record, content in records:
            kind, _, name = record.key.partition("/")
            if isinstance(content, CorruptRecord):
                self._corrupt.add(record, content)
            else:
                self._corrupt.discard(record.key)
            if kind == "members":
                self._leases.pop(name)
                members[name] = None
                if isinstance(content, registry_pb2.Member):
                    self._leases.put(name, record.lease)
                    members[name] = content
            elif kind == "descriptors":
                self._descriptors.pop(name, None)
                if isinstance(content, layout_pb2.KvDescriptor):
                    self._descriptors[name] = content
            elif kind == "policy":
                policy = self._policy_record(record, content)
        return members, policy

    def _policy_record(self, record: Record, content: object) -> PolicyRecord:
        """A corrupt policy leaves the last one in force. SetPolicy replaces it."""
        if isinstance(content, registry_pb2.Policy):
            return PolicyRecord(content, record.revision)
        if isinstance(content, CorruptRecord):
            return PolicyRecord(self.feed.policy.policy, record.revision)
        return PolicyRecord(default_policy(), 0)


def _parse_lease(lease_id: str) -> int | None:
    """etcd's number of a lease. None for a text that no registry made."""
    try:
        lease = int(lease_id, 16) if len(lease_id) <= 16 else 0
    except ValueError:
        return None
    return lease if 0 < lease < 1 << 63 else None
