"""Membership, view and descriptor cache, through outages of the registry."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    InvalidRequest,
    RegistryUnavailable,
    StaleIncarnation,
)
from headrace_common.registry.descriptors import DescriptorCache
from headrace_common.registry.membership import Membership
from headrace_common.registry.renewals import LeaseRenewals
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from tests.component.registry.harness import (
    EtcdServer,
    Registry,
    joined,
    kv_descriptor,
    reference,
    registry_process,
    registry_stub,
    running_registry,
    viewing,
    worker,
)
from tests.freezing import freeze, thaw
from tests.ports import free_port
from tests.waiting import until

# The worker that most tests register.
REF = (worker().worker_id, worker().incarnation)
UNKNOWN = ("decode-9", "f" * 16)


@pytest.fixture
async def cache(registry: Registry) -> AsyncIterator[DescriptorCache]:
    cache = DescriptorCache(registry.endpoint)
    yield cache
    await cache.close()


async def test_a_view_may_follow_some_roles_without_their_layouts(registry: Registry) -> None:
    prefill = worker("prefill-0")
    prefill.role = registry_pb2.Member.ROLE_PREFILL
    async with (
        joined(registry.endpoint, worker("decode-0")),
        open_channel(registry.endpoint) as channel,
    ):
        view = RegistryView(channel, roles=[registry_pb2.Member.ROLE_PREFILL], without_layouts=True)
        await view.start(10)
        try:
            assert not view.members
            async with joined(registry.endpoint, prefill), joined(registry.endpoint, worker("d-1")):
                await until(lambda: "prefill-0" in view.members)
                (found,) = view.members.values()
                assert (found.endpoint, found.HasField("layout")) == (prefill.endpoint, False)
            await until(lambda: not view.members)
        finally:
            await view.stop()


async def test_members_of_one_process_share_one_stream_of_renewals(registry: Registry) -> None:
    async with open_channel(registry.endpoint) as channel, viewing(registry.endpoint) as view:
        renewals = LeaseRenewals(channel, 0.3)
        members = [
            Membership(channel, worker(f"decode-{number}"), 1.0, renewals=renewals)
            for number in range(8)
        ]
        tasks = len([task for task in asyncio.all_tasks() if task.get_name() == "lease renewals"])
        await asyncio.gather(*(member.start() for member in members))
        await until(lambda: len(view.members) == 8, what="the members in the view")
        # Well beyond their TTL.
        await asyncio.sleep(2.5)
        assert len(view.members) == 8
        assert all(member.registered for member in members)
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert names.count("lease renewals") == tasks + 1
        # A lost lease is registered again.
        (lease_id,) = [members[0]._lease_id]
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        await stub.Deregister(registry_pb2.DeregisterRequest(lease_id=lease_id))
        await until(lambda: members[0]._lease_id not in ("", lease_id), 8, "another lease")
        await asyncio.gather(*(member.stop() for member in members))
        await renewals.close()


async def test_a_member_is_in_the_view_from_start_to_stop(registry: Registry) -> None:
    changes: list[int] = []
    async with viewing(registry.endpoint, lambda view: changes.append(len(view.members))) as view:
        async with joined(registry.endpoint, worker(), 1.0, kv_descriptor()) as membership:
            assert membership.registered
            await until(lambda: "decode-0" in view.members, what="the member in the view")
            # Well beyond its TTL.
            await asyncio.sleep(2.5)
            assert list(view.members) == ["decode-0"]
            assert [member.worker_id for member in view.of_role(worker().role)] == ["decode-0"]
            assert view.of_role(registry_pb2.Member.ROLE_ROUTER) == ()
            before = view.members
        await until(lambda: changes[-1] == 0, what="a notification of the empty view")
        assert not view.members
        assert list(before) == ["decode-0"]
        assert changes == [0, 1, 0]


async def test_a_view_keeps_its_members_when_the_registry_returns_empty(
    registry: Registry, cache: DescriptorCache
) -> None:
    async with (
        joined(registry.endpoint, worker("decode-0"), 2.0, kv_descriptor()),
        joined(registry.endpoint, worker("decode-1"), 2.0) as leaves,
        viewing(registry.endpoint, grace_s=8.0) as view,
    ):
        assert len(view.members) == 2
        await registry.stop()
        await until(lambda: not view.connected, what="the lost connection")
        assert leaves._keeper is not None
        leaves._keeper.cancel()
        await asyncio.sleep(1)
        assert sorted(view.members) == ["decode-0", "decode-1"]
        await registry.start()
        assert registry.store is not None
        assert not registry.store.members
        store = registry.store
        await until(lambda: "decode-0" in store.members, 6, "the new registration")
        await until(lambda: view.connected, 6, "the new connection")
        # The member that has ended is still in its grace.
        assert sorted(view.members) == ["decode-0", "decode-1"]
        await until(
            lambda: list(view.members) == ["decode-0"], 15, "the removal of the other member"
        )
        assert await cache.get(*REF, Deadline.after(2)) == kv_descriptor()


async def test_a_view_continues_after_a_broken_connection(
    registry: Registry, stub: registry_pb2_grpc.RegistryServiceAsyncStub
) -> None:
    async with (
        joined(registry.endpoint, worker(), 30.0) as membership,
        viewing(registry.endpoint, grace_s=60.0) as view,
    ):
        await view._link._channel.close()
        await until(lambda: not view.connected, what="the lost connection")
        assert list(view.members) == ["decode-0"]
        assert view._follower is not None
        assert not view._follower.done()
        await membership.stop()
    assert not (await stub.ListMembers(registry_pb2.ListMembersRequest())).members


async def test_policies_reach_the_view(
    registry: Registry, stub: registry_pb2_grpc.RegistryServiceAsyncStub
) -> None:
    assert RegistryView(registry.endpoint).policy.retry_budget == 2
    async with viewing(registry.endpoint) as view:
        policy = registry_pb2.Policy(local_prefill_max_tokens=9, retry_budget=0)
        await stub.SetPolicy(registry_pb2.SetPolicyRequest(policy=policy))
        await until(lambda: view.policy == policy, what="the policy")


async def test_a_callback_that_fails_does_not_end_the_view(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: RegistryView) -> None:
        raise ValueError("broken callback")

    async with viewing(registry.endpoint, broken) as view, joined(registry.endpoint):
        await until(lambda: "decode-0" in view.members, what="the member")
        assert view.connected
        assert "broken callback" in caplog.text


async def test_start_fails_without_a_registry() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    view, membership = RegistryView(nowhere), Membership(nowhere, worker())
    started_s = time.monotonic()
    for part in (view, membership):
        with pytest.raises(RegistryUnavailable, match=nowhere):
            await part.start(0.5)
    assert time.monotonic() - started_s < 4
    await membership.stop()


async def test_start_waits_for_a_registry(registry: Registry) -> None:
    await registry.stop()
    view, membership = RegistryView(registry.endpoint), Membership(registry.endpoint, worker())
    starting = asyncio.gather(view.start(10), membership.start(10))
    await asyncio.sleep(0.7)
    await registry.start()
    await starting
    await until(lambda: "decode-0" in view.members, what="the member")
    await membership.stop()
    await view.stop()


async def test_start_registers_again_when_its_lease_ends_before_the_descriptor_arrives(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry.store is not None
    put, ended = registry.store.put_descriptor, list[str]()
    end_lease = registry.store.deregister

    async def put_late(lease_id: str, *arguments: Any) -> int:
        if not ended:
            ended.append(lease_id)
            await end_lease(lease_id)
        return await put(lease_id, *arguments)

    monkeypatch.setattr(registry.store, "put_descriptor", put_late)
    async with joined(registry.endpoint, worker(), 2.0, kv_descriptor()) as membership:
        assert membership.registered
        assert ended
        async with registry_stub(registry.endpoint) as stub:
            request = registry_pb2.GetKvDescriptorRequest(member=reference(worker()))
            assert (await stub.GetKvDescriptor(request)).HasField("descriptor")


async def test_a_rejected_record_ends_the_start(registry: Registry) -> None:
    wrong = worker()
    wrong.endpoint = ""
    refused = Membership(registry.endpoint, wrong)
    with pytest.raises(InvalidRequest):
        await refused.start(5)
    await refused.stop()


async def test_a_newer_incarnation_displaces_an_older_one_for_good(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    older = Membership(registry.endpoint, worker(generation=1), ttl_s=1)
    await older.start(5)
    # It was restarted, and its clock was set back meanwhile.
    restarted = worker(generation=2)
    restarted.start_unix_ns -= 3600 * 10**9
    newer = Membership(registry.endpoint, restarted, ttl_s=1)
    await newer.start(5)
    await until(lambda: not older.registered, 5, "the end of the older one's lease")
    await until(lambda: "newer incarnation" in caplog.text, 5, "its next registration")
    async with registry_stub(registry.endpoint) as stub:
        listed = await stub.ListMembers(registry_pb2.ListMembersRequest())
    assert [member.incarnation for member in listed.members] == [restarted.incarnation]
    assert newer.registered
    await older.stop()
    await newer.stop()


async def test_a_descriptor_is_requested_once(registry: Registry, cache: DescriptorCache) -> None:
    async with joined(registry.endpoint, descriptor=kv_descriptor()):
        got = await asyncio.gather(*(cache.get(*REF, Deadline.after(5)) for _ in range(20)))
        assert all(descriptor is got[0] for descriptor in got)
        with pytest.raises(StaleIncarnation):
            await cache.get(REF[0], "f" * 16, Deadline.after(5))
    await registry.stop()
    assert await cache.get(*REF, Deadline.after(1)) is got[0]
    started_s = time.monotonic()
    with pytest.raises(RegistryUnavailable):
        await cache.get("decode-1", REF[1], Deadline.after(0.5))
    assert time.monotonic() - started_s < 2


async def test_a_prefetched_descriptor_is_available_without_the_registry(
    registry: Registry, cache: DescriptorCache
) -> None:
    async with joined(registry.endpoint, descriptor=kv_descriptor()):
        # An unknown member does not delay the other.
        cache.prefetch([REF, UNKNOWN])
        await until(lambda: bool(cache._descriptors), 5, "the descriptor")
    await registry.stop()
    assert await cache.get(*REF, Deadline.after(0.5)) == kv_descriptor()


async def test_prefetch_waits_for_a_descriptor_to_be_published(
    registry: Registry, cache: DescriptorCache
) -> None:
    cache.prefetch([UNKNOWN, REF])
    await asyncio.sleep(0.3)
    assert not cache._descriptors
    async with joined(registry.endpoint, descriptor=kv_descriptor()):
        await until(lambda: bool(cache._descriptors), 5, "the descriptor")


async def test_get_waits_for_a_descriptor_to_be_published(
    registry: Registry, cache: DescriptorCache
) -> None:
    waiting = asyncio.ensure_future(cache.get(*REF, Deadline.after(5)))
    await asyncio.sleep(0.1)
    async with joined(registry.endpoint, descriptor=kv_descriptor()):
        assert await waiting == kv_descriptor()


async def test_the_cancellation_of_one_caller_does_not_affect_others(
    registry: Registry, cache: DescriptorCache
) -> None:
    async with joined(registry.endpoint, descriptor=kv_descriptor()):
        first, second = (
            asyncio.ensure_future(cache.get(*REF, Deadline.after(5))) for _ in range(2)
        )
        await asyncio.sleep(0)
        first.cancel()
        assert await second == kv_descriptor()
        assert first.cancelled() or first.done()


async def test_a_fetch_that_fails_after_its_caller_has_ended_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def abandon_fetch() -> None:
        async with running_registry() as registry:
            cache = DescriptorCache(registry.endpoint)
            caller = asyncio.ensure_future(cache.get(*UNKNOWN, Deadline.after(5)))
            await until(lambda: bool(cache._fetches), what="the start of the fetch")
            caller.cancel()
            await until(lambda: not cache._fetches, what="the end of the fetch")
            await cache.close()

    await abandon_fetch()
    # Runs the finalizers, in which asyncio logs an exception that nothing has read.
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_registry_frozen_beyond_the_ttl_expires_no_member(tmp_path: Path) -> None:
    views: list[frozenset[str]] = []
    async with (
        registry_process(tmp_path) as (process, endpoint),
        joined(endpoint, worker(), 1.5) as membership,
        viewing(endpoint, lambda view: views.append(frozenset(view.members))) as view,
    ):
        freeze(process.pid)
        await asyncio.sleep(4)
        thaw(process.pid)
        await asyncio.sleep(2.5)
        assert list(view.members) == ["decode-0"]
        assert membership.registered
        assert set(views) == {frozenset({"decode-0"})}


@pytest.mark.etcd
async def test_members_and_view_survive_an_outage_of_etcd(etcd: EtcdServer) -> None:
    gone: list[frozenset[str]] = []
    async with (
        running_registry(store=f"etcd://127.0.0.1:{etcd.port}") as registry,
        AsyncExitStack() as stack,
    ):
        for n in range(3):
            member = joined(registry.endpoint, worker(f"decode-{n}"), 10.0, kv_descriptor())
            await stack.enter_async_context(member)
        view = await stack.enter_async_context(
            viewing(registry.endpoint, lambda view: gone.append(frozenset(view.members)))
        )
        everyone = frozenset(view.members)
        etcd.kill()
        await asyncio.sleep(5)
        assert frozenset(view.members) == everyone
        await asyncio.to_thread(etcd.start)
        await stack.enter_async_context(joined(registry.endpoint, worker("decode-9")))
        await until(lambda: "decode-9" in view.members, 5, "the new member in the view")
        await asyncio.sleep(3)
        assert frozenset(view.members) == everyone | {"decode-9"}
        assert all(everyone <= members for members in gone)
