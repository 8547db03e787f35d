"""Membership, view and descriptor cache, through outages of the registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.errors import Draining, InvalidRequest, RegistryUnavailable
from headrace_common.registry.descriptors import DescriptorCache
from headrace_common.registry.membership import Membership
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from tests.component.registry.harness import Registry, joined, viewing, worker
from tests.waiting import until


@pytest.fixture
async def cache(registry: Registry) -> AsyncIterator[DescriptorCache]:
    async with open_channel(registry.endpoint) as channel:
        cache = DescriptorCache(channel)
        yield cache
        await cache.close()


async def test_a_view_continues_after_a_broken_connection(
    registry: Registry, stub: registry_pb2_grpc.RegistryServiceAsyncStub
) -> None:
    channel = open_channel(registry.endpoint)
    view = RegistryView(channel, grace_s=60.0)
    async with joined(registry.endpoint, worker(), 30.0) as membership:
        await view.start(10)
        await channel.close()
        await until(lambda: not view.connected, what="the lost connection")
        assert list(view.members) == ["decode-0"]
        assert view._follower is not None
        assert not view._follower.done()
        await membership.stop()
    await view.stop()
    assert not (await stub.ListMembers(registry_pb2.ListMembersRequest())).members


async def test_policies_reach_the_view(
    registry: Registry, stub: registry_pb2_grpc.RegistryServiceAsyncStub
) -> None:
    async with viewing(registry.endpoint) as view:
        assert view.policy.retry_budget == 2
        policy = registry_pb2.Policy(local_prefill_max_tokens=9, retry_budget=0)
        await stub.SetPolicy(registry_pb2.SetPolicyRequest(policy=policy))
        await until(lambda: view.policy == policy, what="the policy")


async def test_a_rejected_record_ends_the_start(registry: Registry) -> None:
    wrong = worker()
    wrong.endpoint = ""
    async with open_channel(registry.endpoint) as channel:
        refused = Membership(channel, wrong)
        with pytest.raises(InvalidRequest):
            await refused.start(5)
        await refused.stop()


async def test_a_member_replaces_its_record_and_keeps_it_through_an_outage(
    registry: Registry,
) -> None:
    first, second, third = (worker() for _ in range(3))
    second.version, third.version = "2", "3"
    async with (
        joined(registry.endpoint, first, 2.0) as membership,
        viewing(registry.endpoint) as view,
    ):

        def version() -> str:
            return view.members[first.worker_id].version

        await membership.replace(second, 5.0)
        await until(lambda: version() == "2")
        # Its lease is kept: another one would end now.
        await asyncio.sleep(2.5)
        assert version() == "2"
        await registry.stop()
        with pytest.raises(RegistryUnavailable):
            await membership.replace(third, 0.2)
        await registry.start()
        await until(lambda: version() == "3")
        await membership.stop()
        with pytest.raises(Draining, match="not registered any more"):
            await membership.replace(second, 5.0)
