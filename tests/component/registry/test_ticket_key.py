"""Routers sign tickets and decode workers check them with one key, also after restarts."""

from __future__ import annotations

import grpc.aio
import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.limits import TICKET_KEY_BYTES
from headrace_common.registry.membership import Membership
from headrace_common.rpc.status import error_from_rpc
from headrace_registry.config import RegistryConfig
from tests.component.registry.harness import registry_stub, running_registry, worker
from tests.waiting import until

PROPOSED = bytes(range(TICKET_KEY_BYTES))


async def test_members_agree_on_a_key_after_the_registry_lost_or_changed_it() -> None:
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


async def test_a_configured_key_overrides_and_a_short_one_is_rejected() -> None:
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
