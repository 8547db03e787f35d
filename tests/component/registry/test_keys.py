"""All processes of a deployment use one prefix hash key and one ticket key, also after restarts."""

from __future__ import annotations

import logging

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.limits import TICKET_KEY_BYTES
from headrace_registry.config import RegistryConfig
from tests.component.registry.harness import (
    EtcdServer,
    Registry,
    joined,
    registry_stub,
    running_registry,
    worker,
)
from tests.rpc_errors import error_of
from tests.waiting import until

PREFIX_HASH_KEY = 0x0123_4567_89AB_CDEF
TICKET_KEY = bytes(range(TICKET_KEY_BYTES))
SECRET = "a secret of sixteen or more"


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


async def test_a_registry_without_its_records_adopts_the_keys_of_its_members(
    registry: Registry,
) -> None:
    async with (
        joined(registry.endpoint, worker("decode-0"), 1.0) as first,
        joined(registry.endpoint, worker("decode-1"), 1.0) as second,
    ):
        keys = (first.prefix_hash_key, first.ticket_key)
        assert all(keys)
        await registry.stop()
        await registry.start()
        store = registry.store
        assert store is not None
        await until(lambda: len(store.members) == 2, 10, "the return of both")
        await until(lambda: first.registered and second.registered, 10, "their new leases")
        async with joined(registry.endpoint, worker("decode-2")) as late:
            for member in (first, second, late):
                assert (member.prefix_hash_key, member.ticket_key) == keys


async def test_members_take_another_ticket_key_and_keep_their_prefix_hash_key(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        joined(registry.endpoint, worker("decode-0"), 1.0) as first,
        joined(registry.endpoint, worker("decode-1"), 1.0) as second,
    ):
        key, ticket_key = first.prefix_hash_key, first.ticket_key
        await registry.stop()
        registry.settings = dict.fromkeys(("prefix_hash_key", "ticket_key"), "quite another secret")
        await registry.start()
        with caplog.at_level(logging.WARNING):
            await until(lambda: "a different prefix_hash_key" in caplog.text, 10, "the warning")
        assert first.prefix_hash_key == key
        assert f"{key}" not in caplog.text
        await until(
            lambda: all(one.ticket_key not in (b"", ticket_key) for one in (first, second)),
            10,
            "the new key",
        )
        assert first.ticket_key == second.ticket_key


async def test_configured_keys_override_proposed_ones_and_a_short_one_is_rejected() -> None:
    secrets = {"prefix_hash_key": SECRET, "ticket_key": SECRET}
    request = registry_pb2.RegisterRequest(
        member=worker(), prefix_hash_key=PREFIX_HASH_KEY, ticket_key=TICKET_KEY
    )
    request.ttl.FromSeconds(5)
    async with (
        running_registry(**secrets) as registry,
        registry_stub(registry.endpoint) as stub,
    ):
        granted = await stub.Register(request)
        request.ticket_key = b"short"
        error = await error_of(InvalidRequest, stub.Register(request))
    config = RegistryConfig.model_validate(secrets)
    assert granted.prefix_hash_key == config.read_prefix_hash_key() not in (0, PREFIX_HASH_KEY)
    assert granted.ticket_key == config.read_ticket_key() != TICKET_KEY
    assert "ticket_key" in error.violations
