"""RegistryService over gRPC."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TypeAlias

import grpc.aio
import pytest

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.client import list_members
from headrace_common.access.roles import TOKEN_KEY, Role
from headrace_common.access.tokens import create_token, load_local_key
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    Conflict,
    InvalidRequest,
    PermissionDenied,
    QueueFull,
    WatchExpired,
)
from headrace_common.limits import LEASES_PER_RENEWAL_MAX
from headrace_registry import service
from tests.component.registry.harness import (
    Registry,
    kv_descriptor,
    ordered,
    reference,
    registry_stub,
    running_registry,
    worker,
)
from tests.rpc_errors import error_of
from tests.waiting import PATIENCE_S

Stub: TypeAlias = "registry_pb2_grpc.RegistryServiceAsyncStub"


def register(member: registry_pb2.Member, ttl_s: float = 10) -> registry_pb2.RegisterRequest:
    return registry_pb2.RegisterRequest(member=member, ttl=duration_from_seconds(ttl_s))


@pytest.mark.parametrize("offset_s", [-3600.0, -10.0, 10.0, 3600.0])
async def test_a_member_with_a_wrong_clock_is_admitted_with_a_warning(
    stub: Stub, caplog: pytest.LogCaptureFixture, offset_s: float
) -> None:
    request = register(worker())
    request.sent_unix_ns = time.time_ns() + round(offset_s * 1e9)
    await stub.Register(request)
    found = re.search(r"clock of decode-0 is ([0-9.]+) s (ahead of|behind) this reg", caplog.text)
    assert found, caplog.text
    sign = 1 if found[2] == "ahead of" else -1
    assert sign * float(found[1]) == pytest.approx(offset_s, abs=5)


async def read_to_end(
    watch: grpc.aio.UnaryStreamCall[registry_pb2.WatchRequest, registry_pb2.WatchResponse],
) -> None:
    while await watch.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (
            registry_pb2.KeepAliveRequest(lease_ids=["x"] * (LEASES_PER_RENEWAL_MAX + 1)),
            "lease_ids",
        ),
        (registry_pb2.KeepAliveRequest(lease_id="x", lease_ids=["y"]), "lease_id"),
    ],
)
async def test_wrong_renewals_are_refused(
    stub: Stub, request_: registry_pb2.KeepAliveRequest, field: str
) -> None:
    call = stub.KeepAlive()
    await call.write(request_)
    error = await error_of(InvalidRequest, call.read())
    assert list(error.metadata) == [field]


async def test_members_are_listed_by_page_and_role(
    registry: Registry, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        await stub.Register(register(worker(f"decode-{number}")))
    router = registry_pb2.Member.ROLE_ROUTER
    await stub.Register(register(worker("router-0", role=router)))
    seen: list[str] = []
    token = ""
    for expected_size in (2, 2, 2):
        page = await stub.ListMembers(
            registry_pb2.ListMembersRequest(page_size=2, page_token=token)
        )
        assert len(page.members) == expected_size
        seen += [member.worker_id for member in page.members]
        token = page.next_page_token
    assert token == ""
    assert seen == [f"decode-{number}" for number in range(5)] + ["router-0"]
    routers = await stub.ListMembers(registry_pb2.ListMembersRequest(role=router))
    assert [member.worker_id for member in routers.members] == ["router-0"]
    wrong = registry_pb2.ListMembersRequest(page_size=1001, page_token="No!")
    error = await error_of(InvalidRequest, stub.ListMembers(wrong))
    assert set(error.violations) == {"page_size", "page_token"}
    # Commands read every page.
    monkeypatch.setattr(service, "PAGE_SIZE_MAX", 2)
    assert [member.worker_id for member in await list_members(registry.endpoint)] == seen


async def test_the_policy_rpcs(stub: Stub) -> None:
    default = await stub.GetPolicy(registry_pb2.GetPolicyRequest())
    assert default.revision == 0
    assert default.policy == registry_pb2.Policy(retry_budget=2)
    policy = registry_pb2.Policy(local_prefill_max_tokens=7)
    put = await stub.SetPolicy(registry_pb2.SetPolicyRequest(policy=policy))
    got = await stub.GetPolicy(registry_pb2.GetPolicyRequest())
    assert got.revision == put.revision
    assert (got.policy.local_prefill_max_tokens, got.policy.retry_budget) == (7, 2)
    for request, kind in (
        (registry_pb2.SetPolicyRequest(policy=policy, expected_revision=1), Conflict),
        (registry_pb2.SetPolicyRequest(), InvalidRequest),
        (
            registry_pb2.SetPolicyRequest(policy=registry_pb2.Policy(retry_budget=11)),
            InvalidRequest,
        ),
    ):
        await error_of(kind, stub.SetPolicy(request))


async def test_a_full_registry_rejects_only_new_members() -> None:
    async with (
        running_registry(max_members=1) as registry,
        registry_stub(registry.endpoint) as stub,
    ):
        await stub.Register(register(worker()))
        await error_of(QueueFull, stub.Register(register(worker("decode-1"))))
        await stub.Register(register(worker(generation=2)))


async def test_credentials_without_a_name_register_a_bounded_number_of_each_role() -> None:
    prefill = worker("prefill-0")
    prefill.role = registry_pb2.Member.ROLE_PREFILL
    key = load_local_key()
    decode = [((TOKEN_KEY, create_token(key, Role.DECODE, name, 60)),) for name in ("", "decode-1")]
    async with (
        running_registry(insecure=False, max_unnamed_members=1) as registry,
        grpc.aio.insecure_channel(registry.endpoint) as channel,
    ):
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        await stub.Register(register(worker()), metadata=decode[0])
        refused = register(worker("decode-1"))
        error = await error_of(QueueFull, stub.Register(refused, metadata=decode[0]))
        assert "raise the registry's max_unnamed_members" in error.detail
        assert error.metadata["role"] == "decode"
        # It may register its own member again. Another role, and the holder of the name, are not bound by it.
        await stub.Register(register(worker(generation=2)), metadata=decode[0])
        own = ((TOKEN_KEY, create_token(key, Role.PREFILL, "", 60)),)
        await stub.Register(register(prefill), metadata=own)
        await stub.Register(refused, metadata=decode[1])


async def test_only_the_role_of_a_member_registers_it_and_that_of_both_roles_registers_workers() -> (
    None
):
    roles = registry_pb2.Member.Role
    permitted = {
        (Role.PREFILL, roles.ROLE_PREFILL),
        (Role.DECODE, roles.ROLE_DECODE),
        *((Role.WORKER, role) for role in (roles.ROLE_PREFILL, roles.ROLE_DECODE, roles.ROLE_BOTH)),
    }
    async with (
        running_registry(insecure=False) as registry,
        grpc.aio.insecure_channel(registry.endpoint) as channel,
    ):
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        for credential in (Role.PREFILL, Role.DECODE, Role.WORKER):
            metadata = ((TOKEN_KEY, create_token(load_local_key(), credential, "", 60)),)
            for role in (
                *(roles.ROLE_ROUTER, roles.ROLE_PREFILL),
                *(roles.ROLE_DECODE, roles.ROLE_BOTH),
            ):
                member = worker(f"{credential}-{role}")
                member.role = role
                if role == roles.ROLE_ROUTER:
                    member.ClearField("model")
                call = stub.Register(register(member), metadata=metadata)
                if (credential, role) in permitted:
                    assert (await call).lease_id
                else:
                    error = await error_of(PermissionDenied, call)
                    assert "cannot register a member of the role" in error.detail


@pytest.mark.parametrize("owner", [Role.WORKER, Role.DECODE, Role.PREFILL])
async def test_only_senders_read_where_the_memory_of_a_worker_is(owner: Role) -> None:
    member = worker("worker-0")
    member.role = {
        Role.WORKER: registry_pb2.Member.ROLE_BOTH,
        Role.DECODE: registry_pb2.Member.ROLE_DECODE,
        Role.PREFILL: registry_pb2.Member.ROLE_PREFILL,
    }[owner]
    tokens = {role: ((TOKEN_KEY, create_token(load_local_key(), role, "", 60)),) for role in Role}
    async with (
        running_registry(insecure=False) as registry,
        grpc.aio.insecure_channel(registry.endpoint) as channel,
    ):
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        granted = await stub.Register(register(member), metadata=tokens[owner])
        descriptor = registry_pb2.PutKvDescriptorRequest(
            lease_id=granted.lease_id, member=reference(member), descriptor=kv_descriptor()
        )
        await stub.PutKvDescriptor(descriptor, metadata=tokens[owner])
        wanted = registry_pb2.GetKvDescriptorRequest(member=reference(member))
        for role in Role:
            call = stub.GetKvDescriptor(wanted, metadata=tokens[role])
            if role in (Role.PREFILL, Role.DECODE, Role.WORKER):
                assert (await call).descriptor == kv_descriptor()
            else:
                await error_of(PermissionDenied, call)


async def test_a_member_that_registers_again_and_again_is_refused_and_others_are_not() -> None:
    async with (
        running_registry(max_registrations_per_s=0.001) as registry,
        registry_stub(registry.endpoint) as stub,
    ):
        for _ in range(2):
            await stub.Register(register(worker()))
        error = await error_of(QueueFull, stub.Register(register(worker())))
        assert "decode-0 registers too often" in error.detail
        assert error.retry_after_s
        await stub.Register(register(worker("decode-1")))


async def test_the_routers_are_bounded_and_a_known_one_may_register_again() -> None:
    def router(name: str) -> registry_pb2.Member:
        member = worker(name)
        member.role = registry_pb2.Member.ROLE_ROUTER
        member.ClearField("model")
        return member

    async with (
        running_registry(max_routers=2) as registry,
        registry_stub(registry.endpoint) as stub,
    ):
        for number in range(2):
            await stub.Register(register(router(f"router-{number}")))
        error = await error_of(QueueFull, stub.Register(register(router("router-2"))))
        assert "raise the registry's max_routers" in error.detail
        await stub.Register(register(router("router-1")))
        await stub.Register(register(worker("decode-1")))


@pytest.mark.parametrize("roles", [[0], [9], [2, 2]])
async def test_a_watch_of_unknown_or_repeated_roles_is_refused(
    stub: Stub, roles: list[int]
) -> None:
    wanted = registry_pb2.WatchRequest(roles=roles)  # type: ignore[arg-type]
    error = await error_of(InvalidRequest, stub.Watch(wanted).read())
    assert list(error.violations) == ["roles"]


async def test_a_watcher_that_does_not_read_expires_and_delays_no_other() -> None:
    # Without bandwidth probes, the receive window of a connection stays at 64 KiB.
    small = [("grpc.http2.bdp_probe", 0), ("grpc.enable_http_proxy", 0)]
    async with (
        running_registry(history_size=4) as registry,
        registry_stub(registry.endpoint) as stub,
        grpc.aio.insecure_channel(registry.endpoint, options=small) as channel,
    ):
        slow = registry_pb2_grpc.RegistryServiceStub(channel).Watch(registry_pb2.WatchRequest())
        fast = stub.Watch(registry_pb2.WatchRequest())
        await slow.read()
        await fast.read()
        for number in range(260):
            member = worker(f"decode-{number}")
            member.layout.model = "m" * 250
            member.model = "n" * 250
            granted = await stub.Register(register(member, 300))
            response = await asyncio.wait_for(fast.read(), PATIENCE_S)
            assert isinstance(response, registry_pb2.WatchResponse)
            assert response.changes[0].member_put == ordered(member, granted.registration_order)
        await error_of(WatchExpired, asyncio.wait_for(read_to_end(slow), PATIENCE_S))
        fast.cancel()
