"""Membership, view and descriptor cache over minutes of virtual time, through outages of the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import RegistryUnavailable, StaleIncarnation
from headrace_common.registry.descriptors import DescriptorCache
from headrace_common.registry.membership import LeaseRenewals, Membership
from headrace_common.registry.view import RegistryView
from headrace_registry.store.base import MemoryStore
from tests.component.registry.harness import kv_descriptor, worker
from tests.component.registry.local_registry import LocalRegistry, local_registry
from tests.virtually import stand_still, virtually

REF = (worker().worker_id, worker().incarnation)
UNKNOWN = ("decode-9", "f" * 16)
TTL_S = 10.0
FOREVER_S = 600.0
"""Many times the time to live of a lease."""


@asynccontextmanager
async def viewing(
    registry: LocalRegistry, on_change: Any = None, grace_s: float = TTL_S
) -> AsyncIterator[RegistryView]:
    view = RegistryView(registry.channel, on_change, grace_s)
    await view.start()
    try:
        yield view
    finally:
        await view.stop()


@asynccontextmanager
async def joined(
    registry: LocalRegistry,
    member: registry_pb2.Member | None = None,
    descriptor: layout_pb2.KvDescriptor | None = None,
) -> AsyncIterator[Membership]:
    membership = Membership(registry.channel, member or worker(), TTL_S, descriptor)
    try:
        await membership.start()
        yield membership
    finally:
        await membership.stop()


@virtually
async def test_members_of_one_process_share_one_stream_of_renewals() -> None:
    async with local_registry() as registry, viewing(registry) as view:
        renewals = LeaseRenewals(registry.channel, 0.3 * TTL_S)
        members = [
            Membership(registry.channel, worker(f"decode-{number}"), TTL_S, renewals=renewals)
            for number in range(8)
        ]
        await asyncio.gather(*(member.start() for member in members))
        await asyncio.sleep(FOREVER_S)
        assert len(view.members) == 8
        assert all(member.registered for member in members)
        assert registry.calls.count("KeepAlive") == 1
        # A lost lease is registered again.
        lease_id = members[0]._lease_id
        assert registry.store is not None
        await registry.store.deregister(lease_id)
        await asyncio.sleep(TTL_S)
        assert members[0]._lease_id not in ("", lease_id)
        await asyncio.gather(*(member.stop() for member in members))
        await renewals.close()


@virtually
async def test_a_member_is_in_the_view_from_start_to_stop() -> None:
    changes: list[int] = []
    async with (
        local_registry() as registry,
        viewing(registry, lambda view: changes.append(len(view.members))) as view,
    ):
        # The registry of the previous release renews no several leases together.
        vars(registry.servicer)["_renew"] = None
        async with joined(registry, descriptor=kv_descriptor()) as membership:
            assert membership.registered
            await asyncio.sleep(FOREVER_S)
            assert registry.calls.count("KeepAlive") == 1
            assert list(view.members) == ["decode-0"]
            assert [member.worker_id for member in view.of_role(worker().role)] == ["decode-0"]
            assert view.of_role(registry_pb2.Member.ROLE_ROUTER) == ()
            before = view.members
        await asyncio.sleep(1.0)
        assert not view.members
        assert list(before) == ["decode-0"]
        assert changes == [0, 1, 0]


@virtually
async def test_a_view_keeps_its_members_when_the_registry_returns_empty() -> None:
    async with (
        local_registry() as registry,
        joined(registry, worker("decode-0"), kv_descriptor()),
        joined(registry, worker("decode-1")) as leaves,
        viewing(registry, grace_s=60.0) as view,
    ):
        await registry.stop()
        await asyncio.sleep(FOREVER_S)
        assert (view.connected, sorted(view.members)) == (False, ["decode-0", "decode-1"])
        assert leaves._keeper is not None
        leaves._keeper.cancel()
        registry.start()
        assert not registry.members
        await asyncio.sleep(59.0)
        assert (view.connected, registry.members) == (True, ["decode-0"])
        # The member that has ended is still in its grace.
        assert sorted(view.members) == ["decode-0", "decode-1"]
        await asyncio.sleep(5.0)
        assert list(view.members) == ["decode-0"]
        cache = DescriptorCache(registry.channel)
        assert await cache.get(*REF, Deadline.after(2)) == kv_descriptor()
        await cache.close()


@virtually
async def test_start_fails_without_a_registry_at_its_deadline() -> None:
    nowhere = LocalRegistry().channel
    view, membership = RegistryView(nowhere), Membership(nowhere, worker())
    for part in (view, membership):
        start_s = time.monotonic()
        with pytest.raises(RegistryUnavailable):
            await part.start(5.0)
        # The back-off is at most a second.
        assert 5.0 <= time.monotonic() - start_s <= 6.0
    await membership.stop()


@virtually
async def test_a_newer_incarnation_displaces_an_older_one_for_good() -> None:
    async with local_registry() as registry:
        older = Membership(registry.channel, worker(generation=1), TTL_S)
        await older.start()
        # It was restarted, and its clock was set back meanwhile.
        restarted = worker(generation=2)
        restarted.start_unix_ns -= 400 * 10**9
        newer = Membership(registry.channel, restarted, TTL_S)
        await newer.start()
        await asyncio.sleep(FOREVER_S)
        assert registry.store is not None
        (listed,) = registry.store.feed.members.values()
        assert listed.incarnation == restarted.incarnation
        assert newer.registered
        assert not older.registered
        await older.stop()
        await newer.stop()


@virtually
async def test_a_descriptor_is_requested_once_and_survives_the_registry() -> None:
    async with local_registry() as registry:
        cache = DescriptorCache(registry.channel)
        async with joined(registry, descriptor=kv_descriptor()):
            got = await asyncio.gather(*(cache.get(*REF, Deadline.after(5)) for _ in range(20)))
            assert all(descriptor is got[0] for descriptor in got)
            assert registry.calls.count("GetKvDescriptor") == 1
            with pytest.raises(StaleIncarnation):
                await cache.get(REF[0], "f" * 16, Deadline.after(5))
        await registry.stop()
        assert await cache.get(*REF, Deadline.after(1)) is got[0]
        start_s = time.monotonic()
        with pytest.raises(RegistryUnavailable):
            await cache.get("decode-1", REF[1], Deadline.after(0.5))
        assert time.monotonic() - start_s == pytest.approx(0.5, abs=0.1)
        await cache.close()
        registry.start()


@virtually
async def test_a_prefetched_descriptor_is_available_without_the_registry() -> None:
    """A prefetch waits for a descriptor to be published. An unknown member does not delay the other."""
    async with local_registry() as registry:
        cache = DescriptorCache(registry.channel)
        cache.prefetch([UNKNOWN, REF])
        await asyncio.sleep(1.0)
        assert not cache._descriptors
        async with joined(registry, descriptor=kv_descriptor()):
            await asyncio.sleep(1.0)
        await registry.stop()
        assert await cache.get(*REF, Deadline.after(0.5)) == kv_descriptor()
        await cache.close()
        registry.start()


@virtually
async def test_a_registry_that_stands_still_beyond_the_ttl_expires_no_member() -> None:
    """Its members could not renew their leases. They have a whole time to live again, and not more."""
    store = MemoryStore(history_size=8)
    registration = await store.register(worker(), 10)
    stand_still(1_000.0)
    await asyncio.sleep(9.0)
    assert list(store.feed.members) == ["decode-0"]
    assert await store.keep_alive(registration.lease_id) is not None
    await asyncio.sleep(9.0)
    assert list(store.feed.members) == ["decode-0"]
    await asyncio.sleep(2.0)
    assert not store.feed.members
    await store.close()
