"""All processes of a deployment use one prefix hash key, also after restarts."""

from __future__ import annotations

import logging

import pytest

from tests.component.registry.harness import Registry, joined, worker
from tests.waiting import PATIENCE_S, until


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
        await until(lambda: len(store.feed.members) == 2, PATIENCE_S, "the return of both")
        await until(lambda: first.registered and second.registered, PATIENCE_S, "their new leases")
        async with joined(registry.endpoint, worker("decode-2")) as late:
            for member in (first, second, late):
                assert member.prefix_hash_key == key


async def test_members_keep_their_prefix_hash_key(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    async with joined(registry.endpoint, worker("decode-0"), 30.0) as first:
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
