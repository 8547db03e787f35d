"""Classes of requests over real gRPC and HTTP: grants."""

from __future__ import annotations

import pytest

from headrace.inference.v1 import priority_pb2
from headrace_common.errors import InvalidRequest, PermissionDenied
from headrace_common.telemetry import schema
from tests.kit.router import Rig, with_settings
from tests.kit.workers import reply

_HIGH, _LOW = priority_pb2.PRIORITY_HIGH, priority_pb2.PRIORITY_LOW


@with_settings(tenants={tenant: tenant for tenant in ("chat", "plain", "batch")})
async def test_a_class_above_the_granted_one_is_refused_by_name(rig: Rig) -> None:
    """Tenant "chat" may use every class, and "batch" the low one."""
    rig.policy.tenant_priorities["chat"] = _HIGH
    rig.policy.tenant_priorities["batch"] = _LOW
    decode = await rig.add_decode(reply("ok"))
    for tenant, priority in (("plain", _HIGH), ("batch", _HIGH), ("batch", 2)):
        error = await rig.error_of(priority=priority, key=tenant)
        assert isinstance(error, PermissionDenied)
        assert error.metadata["field"] == "priority"
    unknown = await rig.error_of(priority=9, key="chat")
    assert isinstance(unknown, InvalidRequest)
    assert list(unknown.violations) == ["priority"]
    assert not decode.requests
    assert rig.router.admission.requests.pool.used == 0
    for tenant, priority, sent in (
        ("chat", _HIGH, _HIGH),
        ("plain", 0, 0),
        ("plain", _LOW, _LOW),
        ("batch", 0, _LOW),
    ):
        name = f"{tenant}-{priority}"
        assert await rig.text(priority=priority, request_id=name, key=tenant) == "ok"
        assert decode.requests[-1].priority == sent
    assert (await rig.root_of("batch-0"))[schema.ATTRIBUTE_PRIORITY] == "low"
    # A change of the policy holds for the next request.
    del rig.policy.tenant_priorities["chat"]
    again = await rig.error_of(priority=_HIGH, key="chat")
    assert isinstance(again, PermissionDenied)


async def test_route_needs_the_same_grant(rig: Rig) -> None:
    await rig.add_decode(reply("ok"))
    with pytest.raises(PermissionDenied):
        await rig.route(priority=_HIGH)
    await rig.route(priority=_LOW)
