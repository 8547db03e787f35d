"""Membership, view and descriptor cache, through outages of the registry."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from pathlib import Path

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    InvalidRequest,
    RegistryUnavailable,
    StaleIncarnation,
)
from headrace_common.registry.descriptors import DescriptorCache
from headrace_common.registry.membership import Membership
from headrace_common.registry.view import RegistryView
from tests.component.registry.harness import (
    EtcdServer,
    kv_descriptor,
    reference,
    registry_process,
    registry_stub,
    running_registry,
    worker,
)
from tests.ports import free_port
from tests.waiting import until


async def test_a_member_is_in_the_view_from_start_to_stop() -> None:
    async with running_registry() as registry:
        changes: list[int] = []
        view = RegistryView(registry.endpoint, lambda view: changes.append(len(view.members)))
        await view.start(5)
        membership = Membership(registry.endpoint, worker(), 1.0, kv_descriptor())
        await membership.start(5)
        assert membership.registered
        await until(lambda: "decode-0" in view.members, 2, "the member in the view")
        # Well beyond its TTL.
        await asyncio.sleep(2.5)
        assert list(view.members) == ["decode-0"]
        assert [member.worker_id for member in view.of_role(worker().role)] == ["decode-0"]
        assert view.of_role(registry_pb2.Member.ROLE_ROUTER) == ()
        before = view.members
        await membership.stop()
        await until(lambda: changes[-1] == 0, 1, "a notification of the empty view")
        assert not view.members
        assert list(before) == ["decode-0"]
        assert changes == [0, 1, 0]
        await view.stop()


async def test_a_view_keeps_its_members_when_the_registry_returns_empty() -> None:
    async with running_registry() as registry:
        view = RegistryView(registry.endpoint, grace_s=3.0)
        stays = Membership(registry.endpoint, worker("decode-0"), 2.0, kv_descriptor())
        leaves = Membership(registry.endpoint, worker("decode-1"), 2.0)
        await stays.start(5)
        await leaves.start(5)
        await view.start(5)
        assert len(view.members) == 2
        await registry.stop()
        await until(lambda: not view.connected, 2, "the lost connection")
        assert leaves._keeper is not None
        leaves._keeper.cancel()
        await asyncio.sleep(1)
        assert sorted(view.members) == ["decode-0", "decode-1"]
        await registry.start()
        assert registry.store is not None
        assert not registry.store.members
        seen_s = time.monotonic()
        store = registry.store
        await until(lambda: "decode-0" in store.members, 4, "the new registration")
        assert time.monotonic() - seen_s < 3.0
        await until(lambda: view.connected, 4, "the new connection")
        # The member that has ended is still in its grace.
        assert sorted(view.members) == ["decode-0", "decode-1"]
        await until(
            lambda: list(view.members) == ["decode-0"], 5, "the removal of the other member"
        )
        cache = DescriptorCache(registry.endpoint)
        ref = reference(worker("decode-0"))
        got = await cache.get(ref.worker_id, ref.incarnation, Deadline.after(2))
        assert got == kv_descriptor()
        await cache.close()
        await leaves.stop()
        await stays.stop()
        await view.stop()


async def test_a_view_continues_after_a_broken_connection() -> None:
    async with running_registry() as registry, registry_stub(registry.endpoint) as stub:
        view = RegistryView(registry.endpoint, grace_s=60.0)
        membership = Membership(registry.endpoint, worker(), 30.0)
        await membership.start(5)
        await view.start(5)
        await view._link._channel.close()
        await until(lambda: not view.connected, 2, "the lost connection")
        assert list(view.members) == ["decode-0"]
        assert view._follower is not None
        assert not view._follower.done()
        await membership.stop()
        await view.stop()
        listed = await stub.ListMembers(registry_pb2.ListMembersRequest())
        assert not listed.members


async def test_policies_reach_the_view() -> None:
    async with running_registry() as registry, registry_stub(registry.endpoint) as stub:
        view = RegistryView(registry.endpoint)
        assert view.policy.retry_budget == 2
        await view.start(5)
        policy = registry_pb2.Policy(local_prefill_max_tokens=9, retry_budget=0)
        await stub.SetPolicy(registry_pb2.SetPolicyRequest(policy=policy))
        await until(lambda: view.policy == policy, 2, "the policy")
        await view.stop()


async def test_a_callback_that_fails_does_not_end_the_view(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: RegistryView) -> None:
        raise ValueError("broken callback")

    async with running_registry() as registry:
        view = RegistryView(registry.endpoint, broken)
        await view.start(5)
        membership = Membership(registry.endpoint, worker(), 5.0)
        await membership.start(5)
        await until(lambda: "decode-0" in view.members, 2, "the member")
        assert view.connected
        assert "broken callback" in caplog.text
        await membership.stop()
        await view.stop()


async def test_start_fails_without_a_registry() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    view, membership = RegistryView(nowhere), Membership(nowhere, worker())
    started_s = time.monotonic()
    with pytest.raises(RegistryUnavailable, match=nowhere):
        await view.start(0.5)
    with pytest.raises(RegistryUnavailable, match=nowhere):
        await membership.start(0.5)
    assert time.monotonic() - started_s < 4
    await membership.stop()


async def test_start_waits_for_a_registry() -> None:
    async with running_registry() as registry:
        await registry.stop()
        view, membership = RegistryView(registry.endpoint), Membership(registry.endpoint, worker())
        starting = asyncio.gather(view.start(10), membership.start(10))
        await asyncio.sleep(0.7)
        await registry.start()
        await starting
        await until(lambda: "decode-0" in view.members, 2, "the member")
        await membership.stop()
        await view.stop()


async def test_a_rejected_record_ends_the_start() -> None:
    async with running_registry() as registry:
        wrong = worker()
        wrong.endpoint = ""
        refused = Membership(registry.endpoint, wrong)
        with pytest.raises(InvalidRequest):
            await refused.start(5)
        await refused.stop()


async def test_a_newer_incarnation_displaces_an_older_one_for_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_registry() as registry, registry_stub(registry.endpoint) as stub:
        older = Membership(registry.endpoint, worker(generation=1), ttl_s=1)
        await older.start(5)
        # It was restarted, and its clock was set back meanwhile.
        restarted = worker(generation=2)
        restarted.start_unix_ns -= 3600 * 10**9
        newer = Membership(registry.endpoint, restarted, ttl_s=1)
        await newer.start(5)
        await until(lambda: not older.registered, 5, "the end of the older one's lease")
        await until(lambda: "newer incarnation" in caplog.text, 5, "its next registration")
        listed = await stub.ListMembers(registry_pb2.ListMembersRequest())
        assert [member.incarnation for member in listed.members] == [restarted.incarnation]
        assert newer.registered
        await older.stop()
        await newer.stop()


async def test_a_descriptor_is_requested_once() -> None:
    async with running_registry() as registry:
        membership = Membership(registry.endpoint, worker(), 10.0, kv_descriptor())
        await membership.start(5)
        cache = DescriptorCache(registry.endpoint)
        ref = reference(worker())
        got = await asyncio.gather(
            *(cache.get(ref.worker_id, ref.incarnation, Deadline.after(5)) for _ in range(20))
        )
        assert all(descriptor is got[0] for descriptor in got)
        with pytest.raises(StaleIncarnation):
            await cache.get(ref.worker_id, "f" * 16, Deadline.after(5))
        await membership.stop()
        await registry.stop()
        assert await cache.get(ref.worker_id, ref.incarnation, Deadline.after(1)) is got[0]
        started_s = time.monotonic()
        with pytest.raises(RegistryUnavailable):
            await cache.get("decode-1", ref.incarnation, Deadline.after(0.5))
        assert time.monotonic() - started_s < 2
        await cache.close()


async def test_a_prefetched_descriptor_is_available_without_the_registry() -> None:
    async with running_registry() as registry:
        membership = Membership(registry.endpoint, worker(), 10.0, kv_descriptor())
        await membership.start(5)
        cache = DescriptorCache(registry.endpoint)
        ref = reference(worker())
        # An unknown member does not delay the other.
        cache.prefetch([(ref.worker_id, ref.incarnation), ("decode-9", "f" * 16)])
        await until(lambda: bool(cache._descriptors), 5, "the descriptor")
        await membership.stop()
        await registry.stop()
        found = await cache.get(ref.worker_id, ref.incarnation, Deadline.after(0.5))
        assert found == kv_descriptor()
        await cache.close()


async def test_prefetch_waits_for_a_descriptor_to_be_published() -> None:
    async with running_registry() as registry:
        cache = DescriptorCache(registry.endpoint)
        ref = reference(worker())
        cache.prefetch([("decode-9", "f" * 16), (ref.worker_id, ref.incarnation)])
        await asyncio.sleep(0.3)
        assert not cache._descriptors
        membership = Membership(registry.endpoint, worker(), 10.0, kv_descriptor())
        await membership.start(5)
        await until(lambda: bool(cache._descriptors), 5, "the descriptor")
        await membership.stop()
        await cache.close()


async def test_get_waits_for_a_descriptor_to_be_published() -> None:
    async with running_registry() as registry:
        cache = DescriptorCache(registry.endpoint)
        ref = reference(worker())
        waiting = asyncio.ensure_future(
            cache.get(ref.worker_id, ref.incarnation, Deadline.after(5))
        )
        await asyncio.sleep(0.1)
        membership = Membership(registry.endpoint, worker(), 10.0, kv_descriptor())
        await membership.start(5)
        assert await waiting == kv_descriptor()
        await membership.stop()
        await cache.close()


async def test_the_cancellation_of_one_caller_does_not_affect_others() -> None:
    async with running_registry() as registry:
        membership = Membership(registry.endpoint, worker(), 10.0, kv_descriptor())
        await membership.start(5)
        cache = DescriptorCache(registry.endpoint)
        ref = reference(worker())
        first, second = (
            asyncio.ensure_future(cache.get(ref.worker_id, ref.incarnation, Deadline.after(5)))
            for _ in range(2)
        )
        await asyncio.sleep(0)
        first.cancel()
        assert await second == kv_descriptor()
        assert first.cancelled() or first.done()
        await membership.stop()
        await cache.close()


async def test_a_fetch_that_fails_after_its_caller_has_ended_logs_nothing() -> None:
    async def abandon_fetch() -> None:
        async with running_registry() as registry:
            cache = DescriptorCache(registry.endpoint)
            caller = asyncio.ensure_future(cache.get("decode-9", "f" * 16, Deadline.after(5)))
            await until(lambda: bool(cache._fetches), 2, "the start of the fetch")
            caller.cancel()
            await until(lambda: not cache._fetches, 2, "the end of the fetch")
            await cache.close()

    await abandon_fetch()
    # Runs the finalizers. The fixture `no_unread_errors` fails the test if asyncio logs an error.
    gc.collect()


async def test_a_registry_frozen_beyond_the_ttl_expires_no_member(tmp_path: Path) -> None:
    async with registry_process(tmp_path) as (process, endpoint):
        views: list[frozenset[str]] = []
        membership = Membership(endpoint, worker(), 1.5)
        await membership.start(10)
        view = RegistryView(endpoint, lambda view: views.append(frozenset(view.members)))
        await view.start(10)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(4)
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.sleep(2.5)
        assert list(view.members) == ["decode-0"]
        assert membership.registered
        assert set(views) == {frozenset({"decode-0"})}
        await membership.stop()
        await view.stop()


@pytest.mark.etcd
async def test_members_and_view_survive_an_outage_of_etcd(etcd: EtcdServer) -> None:
    async with running_registry(store=f"etcd://127.0.0.1:{etcd.port}") as registry:
        gone: list[frozenset[str]] = []
        view = RegistryView(registry.endpoint, lambda view: gone.append(frozenset(view.members)))
        memberships = [
            Membership(registry.endpoint, worker(f"decode-{n}"), 10.0, kv_descriptor())
            for n in range(3)
        ]
        for membership in memberships:
            await membership.start(5)
        await view.start(5)
        everyone = frozenset(view.members)
        etcd.kill()
        await asyncio.sleep(5)
        assert frozenset(view.members) == everyone
        await asyncio.to_thread(etcd.start)
        late = Membership(registry.endpoint, worker("decode-9"), 10.0)
        await late.start(10)
        await until(lambda: "decode-9" in view.members, 5, "the new member in the view")
        await asyncio.sleep(3)
        assert frozenset(view.members) == everyone | {"decode-9"}
        assert all(everyone <= members for members in gone)
        for membership in [*memberships, late]:
            await membership.stop()
        await view.stop()
