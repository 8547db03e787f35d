"""All processes of a deployment use one prefix hash key, also after restarts."""

from __future__ import annotations

import logging

import pytest

from tests.component.registry.harness import (
    EtcdServer,
    Registry,
    joined,
    running_registry,
    worker,
)
from tests.waiting import PATIENCE_S, until


@pytest.mark.etcd
async def test_registries_over_one_etcd_give_the_same_key(
    shared_etcd: EtcdServer, etcd_prefix: str
) -> None:
    settings = {"store": f"etcd://127.0.0.1:{shared_etcd.port}", "store_prefix": etcd_prefix}
    async with (
        running_registry(**settings) as one,
        running_registry(**settings) as other,
        joined(one.endpoint, worker("decode-0")) as first,
        joined(other.endpoint, worker("decode-1")) as second,
    ):
        key = first.prefix_hash_key
        assert key == second.prefix_hash_key != 0
    # A registry that starts after both have ended gives the key from etcd, although no member proposes it.
    async with (
        running_registry(**settings) as third,
        joined(third.endpoint, worker("decode-2")) as late,
    ):
        assert late.prefix_hash_key == key


async def test_a_registry_without_its_records_adopts_the_key_of_its_members(
    registry: Registry,
) -> None:
    async with (
        joined(registry.endpoint, worker("decode-0"), 30.0) as first,
        joined(registry.endpoint, worker("decode-1"), 30.0) as second,
    ):
        key = first.prefix_hash_key
        assert key
        await registry.stop()
        await registry.start()
        store = registry.store
        assert store is not None
        await until(lambda: len(store.members) == 2, PATIENCE_S, "the return of both")
        await until(lambda: first.registered and second.registered, PATIENCE_S, "their new leases")
        async with joined(registry.endpoint, worker("decode-2")) as late:
            for member in (first, second, late):
                assert member.prefix_hash_key == key


async def test_members_keep_their_prefix_hash_key(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        joined(registry.endpoint, worker("decode-0"), 30.0) as first,
    ):
        key = first.prefix_hash_key
        await registry.stop()
        registry.settings = {"prefix_hash_key": "quite another secret"}
        await registry.start()
        with caplog.at_level(logging.WARNING):
            await until(
                lambda: "a different prefix_hash_key" in caplog.text, PATIENCE_S, "the warning"
            )
        assert first.prefix_hash_key == key
        assert f"{key}" not in caplog.text
