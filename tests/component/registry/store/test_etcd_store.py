"""Several registries over one etcd, and outages of etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import RegistryUnavailable
from tests.component.registry.harness import (
    EtcdServer,
    kv_descriptor,
    ordered,
    reference,
    registry_stub,
    running_registry,
    until_renewed,
    worker,
)
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.etcd
LEASE_S = 60


async def fails(call: Awaitable[object]) -> None:
    """A call fails at its limit of time, and does not wait for etcd's return."""
    with pytest.raises(RegistryUnavailable):
        await asyncio.wait_for(call, PATIENCE_S)


async def test_registries_over_one_etcd_agree(shared_etcd: EtcdServer, etcd_prefix: str) -> None:
    one, two = shared_etcd.store(etcd_prefix), shared_etcd.store(etcd_prefix)
    await one.start()
    await two.start()
    member = worker()
    registration = await one.register(member, 30)
    await one.put_descriptor(registration.lease_id, reference(member), kv_descriptor())
    assert await two.get_descriptor(reference(member)) == kv_descriptor()
    assert await two.keep_alive(registration.lease_id) is not None
    await until(lambda: two.feed.revision >= registration.revision, what="the registration")
    assert dict(two.feed.members) == {"decode-0": ordered(member, registration.order)}
    revision = await two.set_policy(registry_pb2.Policy(retry_budget=5), 0)
    await until(lambda: one.feed.revision >= revision, what="the policy")
    assert one.feed.policy == two.feed.policy
    # A watcher of one registry resumes at the other from the same revision.
    resumed = two.watch(registration.revision)
    assert (await anext(resumed)).changes[-1].policy_put.retry_budget == 5
    key = await one.ensure_prefix_hash_key(0)
    assert await two.ensure_prefix_hash_key(0) == key != 0
    await two.deregister(registration.lease_id)
    await until(lambda: not one.feed.members, what="the removal of the member")
    await one.close()
    await two.close()


async def test_a_registry_accepts_a_watch_from_a_revision_that_it_has_not_reached(
    shared_etcd: EtcdServer, etcd_prefix: str
) -> None:
    ahead, other = shared_etcd.store(etcd_prefix), shared_etcd.store(f"{etcd_prefix}other/")
    await ahead.start()
    await other.start()
    # A progress report of etcd may update the other store at any time, so this makes changes until it lacks one.
    revision = 0
    for number in range(50):
        revision = (await ahead.register(worker(f"decode-{number + 10}"), 30)).revision
        if other.feed.revision < revision:
            break
    assert other.feed.revision < revision
    watch = other.watch(revision)
    assert not (await anext(watch)).changes
    later = (await other.register(worker("decode-1"), 30)).revision
    response = await anext(watch)
    assert response.revision == later
    assert response.changes[0].member_put.worker_id == "decode-1"
    await ahead.close()
    await other.close()


async def test_etcd_killed_and_restarted_on_its_data(etcd: EtcdServer) -> None:
    store = etcd.store()
    await store.start()
    members = [worker(f"decode-{number}") for number in range(3)]
    leases = [(await store.register(member, LEASE_S)).lease_id for member in members]
    await store.put_descriptor(leases[0], reference(members[0]), kv_descriptor())
    watch = store.watch(0)
    before = await anext(watch)
    change = asyncio.ensure_future(anext(watch))
    etcd.kill()
    await fails(store.register(worker("decode-9"), LEASE_S))
    await fails(store.keep_alive(leases[0]))
    await fails(store.set_policy(registry_pb2.Policy(), 0))
    assert len(store.feed.members) == 3
    assert await store.get_descriptor(reference(members[0])) == kv_descriptor()
    assert not change.done()
    await asyncio.to_thread(etcd.start)
    await until_renewed(store, leases[0])
    for lease_id in leases:
        assert await store.keep_alive(lease_id) is not None
    assert {member.worker_id for member in store.feed.members.values()} == {
        member.worker_id for member in before.snapshot.members
    }
    registration = await store.register(worker("decode-3"), LEASE_S)
    response = await asyncio.wait_for(change, PATIENCE_S)
    assert [entry.member_put.worker_id for entry in response.changes] == ["decode-3"]
    assert response.revision == registration.revision
    await store.close()


async def test_a_frozen_etcd_does_not_delay_reads(etcd: EtcdServer) -> None:
    async with (
        running_registry(store=f"etcd://127.0.0.1:{etcd.port}", store_timeout_s=4.0) as registry,
        registry_stub(registry.endpoint) as stub,
    ):
        store = registry.store
        assert store is not None
        lease_id = (await store.register(worker(), 30)).lease_id
        etcd.pause()
        try:
            pending = asyncio.gather(*(fails(store.keep_alive(lease_id)) for _ in range(20)))
            for _ in range(10):
                listed = await stub.ListMembers(registry_pb2.ListMembersRequest())
                assert len(listed.members) == 1
            assert not pending.done()
            await pending
        finally:
            etcd.resume()
        await until_renewed(store, lease_id)
