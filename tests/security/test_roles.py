"""Every RPC of a live deployment, called on both listeners, without a credential and in every role."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.duration_pb2 import Duration
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.kv.v1 import handoff_pb2, layout_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli.client import list_members
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role, caller_with
from headrace_common.access.table import ROLES, Listener, needs_role, roles_of
from headrace_common.access.tokens import create_token, load_local_key
from headrace_common.rpc.channel import open_channel
from tests.suite.deployment import Suite, prompt_of, suite

_CALL_TIMEOUT_S = 2.0
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
# Only vLLM's own processes serve it.
_NOT_DEPLOYED = {"/headrace.kv.v1.PairService/Fetch"}


async def listed_methods(endpoint: str) -> set[str]:
    """The RPCs that a server lists by reflection."""
    async with open_channel(endpoint) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest
        (listed,) = await _replies(reflection, [request(list_services="")])
        services = [service.name for service in listed.list_services_response.service]
        files = await _replies(
            reflection, [request(file_containing_symbol=name) for name in services]
        )
    methods: set[str] = set()
    for reply in files:
        for serialized in reply.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(serialized)
            methods |= {
                f"/{file.package}.{service.name}/{method.name}"
                for service in file.service
                for method in service.method
                if f"{file.package}.{service.name}" in services
            }
    return methods


async def _replies(
    stub: reflection_pb2_grpc.ServerReflectionStub,
    requests: Iterable[reflection_pb2.ServerReflectionRequest],
) -> list[reflection_pb2.ServerReflectionResponse]:
    call = stub.ServerReflectionInfo(iter(requests), timeout=_CALL_TIMEOUT_S)
    return [reply async for reply in call]


async def status_of(
    channel: grpc.aio.Channel, method: str, message: bytes | None = None
) -> grpc.StatusCode:
    """The status of a call with at most one message. Any RPC looks like this on the wire."""
    start_call: Any = channel.stream_stream(method)
    call = start_call(timeout=_CALL_TIMEOUT_S)
    try:
        if message is not None:
            await call.write(message)
            await call.done_writing()
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


async def check_internal(endpoint: str, methods: Iterable[str]) -> None:
    for role in (None, *Role):
        held = caller_with(role).roles if role else frozenset()
        async with open_channel(endpoint, Credentials(role=role)) as channel:
            for method in filter(needs_role, methods):
                permitted = bool(held & roles_of(method))
                status = await status_of(channel, method, b"" if permitted else None)
                if role is None:
                    assert status is grpc.StatusCode.UNAUTHENTICATED, method
                elif permitted:
                    assert status not in _REFUSALS, (method, role)
                else:
                    assert status is grpc.StatusCode.PERMISSION_DENIED, (method, role)


async def check_unserved(endpoint: str, methods: Iterable[str]) -> None:
    """RPCs of the other listener are UNIMPLEMENTED, whatever the caller's role."""
    for role in (None, *Role):
        async with open_channel(endpoint, Credentials(role=role)) as channel:
            for method in methods:
                status = await status_of(channel, method)
                assert status is grpc.StatusCode.UNIMPLEMENTED, (method, role)


@pytest.mark.core
async def test_every_rpc_serves_the_roles_of_its_row_and_no_others(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, planner=True) as deployed:
        found: dict[Listener, set[str]] = {listener: set() for listener in Listener}
        for child in deployed.deployment.children:
            internal = await listed_methods(child.endpoint)
            found[Listener.INTERNAL] |= internal
            await check_internal(child.endpoint, internal)
            assert bool(child.client_endpoint) is (child.spec.service == "router")
            if child.client_endpoint:
                facing = await listed_methods(child.client_endpoint)
                found[Listener.CLIENT] |= facing
                await check_unserved(child.endpoint, facing - internal)
                rest = ROLES[Listener.INTERNAL].keys() - ROLES[Listener.CLIENT].keys()
                await check_unserved(child.client_endpoint, rest)
        assert found[Listener.CLIENT] == ROLES[Listener.CLIENT].keys()
        assert found[Listener.INTERNAL] == ROLES[Listener.INTERNAL].keys() - _NOT_DEPLOYED
        token_file = tmp_path / "prefill-9.token"
        token_file.write_text(create_token(load_local_key(), Role.PREFILL, "prefill-9", 600))
        await check_named(deployed, str(token_file))
        prompt = prompt_of(60, 1)
        assert (await deployed.generate(prompt, 6)).token_ids == deployed.expected(prompt, 6)


async def check_named(deployed: Suite, token: str) -> None:
    """A credential of prefill-9, which is in the file `token`, acts as that member only."""
    layout = layout_pb2.KvLayout()
    members = {m.worker_id: m for m in await list_members(deployed.deployment.registry)}
    victim, decode = members["prefill-0"], members["decode-0"]
    for worker_id, denied in (("prefill-0", True), ("prefill-9", False)):
        pull = prefill_pb2.Hello(
            worker_id=worker_id, incarnation=victim.incarnation, model="m", layout=layout
        )
        handoff = handoff_pb2.Hello(
            worker_id=worker_id,
            incarnation=victim.incarnation,
            decode_worker_id=decode.worker_id,
            decode_incarnation=decode.incarnation,
            layout=layout,
        )
        member = registry_pb2.Member()
        member.CopyFrom(victim)
        member.worker_id = worker_id
        register = registry_pb2.RegisterRequest(member=member, ttl=Duration(seconds=2))
        for endpoint, method, request in (
            (
                deployed.deployment.router_internal,
                "/headrace.prefill.v1.PrefillQueueService/Pull",
                prefill_pb2.PullRequest(hello=pull),
            ),
            (
                decode.endpoint,
                "/headrace.kv.v1.HandoffService/Handoff",
                handoff_pb2.HandoffRequest(hello=handoff),
            ),
            (
                deployed.deployment.registry,
                "/headrace.registry.v1.RegistryService/Register",
                register,
            ),
        ):
            async with open_channel(endpoint, Credentials(token_file=token)) as opened:
                status = await status_of(opened, method, request.SerializeToString())
            assert (status is grpc.StatusCode.PERMISSION_DENIED) is denied, (method, worker_id)


def _documented() -> dict[tuple[str, str], str]:
    """The roles of each RPC of each listener in the table of docs/security.md."""
    rows = re.findall(
        r"^\| `(\w+)` \| `([\w.]+)` \| ([\w, ]+) \| ([\w, ]+) \|$",
        _DOCUMENT.read_text(),
        re.MULTILINE,
    )
    return {
        (listener, f"/{service}/{method}"): roles
        for listener, service, methods, roles in rows
        for method in methods.split(", ")
    }


@pytest.mark.core
def test_the_document_has_the_table() -> None:
    documented = _documented()
    assert set(documented) == {
        (listener.value, method) for listener in Listener for method in ROLES[listener]
    }
    for (listener, method), text in documented.items():
        roles = () if listener == Listener.CLIENT else roles_of(method)
        assert text == (", ".join(sorted(roles)) or "every caller"), (listener, method)
