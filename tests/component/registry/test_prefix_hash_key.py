"""All processes of a deployment hash prefixes with one key, also after restarts."""

from __future__ import annotations

import asyncio
import logging

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common.registry.membership import Membership
from headrace_registry.config import RegistryConfig
from tests.component.registry.harness import (
    EtcdServer,
    registry_stub,
    running_registry,
    worker,
)
from tests.waiting import until

PROPOSED = 0x0123_4567_89AB_CDEF


@pytest.mark.etcd
async def test_registries_over_one_etcd_give_the_same_key(
    shared_etcd: EtcdServer, etcd_prefix: str
) -> None:
    settings = {"store": f"etcd://127.0.0.1:{shared_etcd.port}", "store_prefix": etcd_prefix}
    async with running_registry(**settings) as first, running_registry(**settings) as second:
        members = [
            Membership(first.endpoint, worker("decode-0")),
            Membership(second.endpoint, worker("decode-1")),
        ]
        await asyncio.gather(*(member.start(5) for member in members))
        keys = {member.prefix_hash_key for member in members}
        assert len(keys) == 1
        assert 0 not in keys
        for member in members:
            await member.stop()
    # A registry that starts after both have ended gives the key from etcd, although no member proposes it.
    async with running_registry(**settings) as third:
        late = Membership(third.endpoint, worker("decode-2"))
        await late.start(5)
        assert {late.prefix_hash_key} == keys
        await late.stop()


async def test_a_registry_without_its_records_adopts_the_key_of_its_members() -> None:
    async with running_registry() as registry:
        first = Membership(registry.endpoint, worker("decode-0"), 1.0)
        await first.start(5)
        key = first.prefix_hash_key
        assert key
        await registry.stop()
        await registry.start()
        store = registry.store
        assert store is not None
        await until(lambda: "decode-0" in store.members, 10, "the member's return")
        late = Membership(registry.endpoint, worker("decode-1"))
        await late.start(5)
        assert late.prefix_hash_key == first.prefix_hash_key == key
        await late.stop()
        await first.stop()


async def test_a_member_keeps_its_key_and_logs_that_the_registry_has_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_registry() as registry:
        first = Membership(registry.endpoint, worker("decode-0"), 1.0)
        await first.start(5)
        key = first.prefix_hash_key
        await registry.stop()
        registry.settings = {"prefix_hash_key": "quite another secret"}
        await registry.start()
        with caplog.at_level(logging.WARNING):
            await until(lambda: "a different prefix_hash_key" in caplog.text, 10, "the warning")
        assert first.prefix_hash_key == key
        assert f"{key}" not in caplog.text
        await first.stop()


async def test_a_configured_key_overrides_the_proposed_one() -> None:
    secret = "a secret of sixteen or more"
    async with running_registry(prefix_hash_key=secret) as registry:
        async with registry_stub(registry.endpoint) as stub:
            request = registry_pb2.RegisterRequest(member=worker(), prefix_hash_key=PROPOSED)
            request.ttl.FromSeconds(5)
            granted = await stub.Register(request)
        config = RegistryConfig.model_validate({"prefix_hash_key": secret})
        assert granted.prefix_hash_key == config.prefix_hash_key_number not in (0, PROPOSED)
