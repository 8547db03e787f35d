"""Routers sign and decode workers check with one key, whatever restarts."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.registry.membership import Membership
from headrace_common.rpc.status import error_from_rpc
from headrace_registry.config import RegistryConfig
from headrace_registry.store.base import TICKET_KEY_BYTES, Store
from tests.component.registry.harness import registry_stub, running_registry, until, worker

PROPOSED = bytes(range(TICKET_KEY_BYTES))


async def test_a_store_makes_a_key_once(store: Store) -> None:
    keys = await asyncio.gather(*(store.ensure_ticket_key(b"") for _ in range(8)))
    assert len(set(keys)) == 1
    assert len(keys[0]) == TICKET_KEY_BYTES
    assert await store.ensure_ticket_key(PROPOSED) == keys[0]


async def test_a_store_without_a_key_adopts_the_first_proposed(store: Store) -> None:
    assert await store.ensure_ticket_key(PROPOSED) == PROPOSED
    assert await store.ensure_ticket_key(bytes(TICKET_KEY_BYTES)) == PROPOSED


async def test_members_agree_again_after_the_registry_forgot_or_was_told_another_key() -> None:
    async with running_registry() as registry:
        members = [Membership(registry.endpoint, worker(f"decode-{n}"), 1.0) for n in range(2)]
        for member in members:
            await member.start(5)
        first = members[0].ticket_key
        assert first == members[1].ticket_key != b""
        await registry.stop()
        await registry.start()
        await until(lambda: all(member.registered for member in members), 10, "their return")
        assert [member.ticket_key for member in members] == [first, first]
        await registry.stop()
        registry.settings = {"ticket_key": "quite another secret"}
        await registry.start()
        await until(
            lambda: all(member.ticket_key not in (b"", first) for member in members),
            10,
            "the new key",
        )
        assert members[0].ticket_key == members[1].ticket_key
        for member in members:
            await member.stop()


async def test_a_configured_key_comes_first_and_a_short_one_is_refused() -> None:
    secret = "a secret of sixteen or more"
    async with (
        running_registry(ticket_key=secret) as registry,
        registry_stub(registry.endpoint) as stub,
    ):
        request = registry_pb2.RegisterRequest(member=worker(), ticket_key=PROPOSED)
        request.ttl.FromSeconds(5)
        granted = await stub.Register(request)
        request.ticket_key = b"short"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Register(request)
    config = RegistryConfig.model_validate({"ticket_key": secret})
    assert granted.ticket_key == config.ticket_key_bytes != PROPOSED
    error = error_from_rpc(raised.value)
    assert isinstance(error, InvalidRequest)
    assert "ticket_key" in error.violations
