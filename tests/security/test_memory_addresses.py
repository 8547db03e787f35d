"""The addresses of KV memory: only the role that writes there learns them, and no output shows them."""

from __future__ import annotations

import io
from pathlib import Path

import grpc
import grpc.aio
import pytest
from rich.console import Console

from headrace.kv.v1 import handoff_pb2, layout_pb2
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.client import list_members
from headrace_cli.members import member_rows, workers_object, workers_view
from headrace_cli.output import json_text
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.access.tokens import create_token, load_local_key
from headrace_common.errors import HeadraceError
from headrace_common.rpc.channel import open_channel
from tests.security.test_roles import status_of
from tests.suite.deployment import Suite, prompt_of, suite

_CALL_TIMEOUT_S = 5.0
_REMOTE_TOKENS = 60


def registry_stub(channel: grpc.aio.Channel) -> registry_pb2_grpc.RegistryServiceAsyncStub:
    return registry_pb2_grpc.RegistryServiceStub(channel)


async def describe(
    deployed: Suite, worker_id: str, role: Role
) -> layout_pb2.KvDescriptor | grpc.StatusCode:
    """The KV descriptor of a worker that a caller gets, or the status with which it is refused."""
    registry = deployed.deployment.registry
    members = {one.worker_id: one for one in await list_members(registry)}
    reference = registry_pb2.MemberRef(
        worker_id=worker_id, incarnation=members[worker_id].incarnation
    )
    async with open_channel(registry, Credentials(role=role)) as channel:
        try:
            answer = await registry_stub(channel).GetKvDescriptor(
                registry_pb2.GetKvDescriptorRequest(member=reference), timeout=_CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            return error.code()
    return answer.descriptor


def secrets_of(descriptor: layout_pb2.KvDescriptor) -> set[str]:
    """The texts by which the memory is reached."""
    found: set[str] = set()
    for rank in descriptor.ranks:
        found |= {str(rank.base_address), f"{rank.base_address:x}", rank.session}
        parts = [part.partition("=")[2] for part in rank.session.split(";")]
        found |= {f":{part.partition('/')[0].rpartition(':')[2]}" for part in parts}
        found |= {part.partition("/")[2] for part in parts} - {""}
    assert len(found) >= 6
    return found


FETCHES_NOTHING = (("prefill", "prefix_fetch_gain", "1"),)


async def test_a_worker_receives_handoffs_of_workers_only(tmp_path: Path) -> None:
    async with suite(tmp_path) as deployed:
        for worker_id in ("decode-0", "prefill-0"):
            for role in (Role.PREFILL, Role.DECODE, Role.ROUTER):
                status = await open_handoff(deployed, worker_id, role)
                refused = status is grpc.StatusCode.PERMISSION_DENIED
                assert refused is (role is Role.ROUTER), (worker_id, role, status)


async def open_handoff(deployed: Suite, worker_id: str, role: Role) -> grpc.StatusCode:
    """The status of a stream with a Hello that has no layout."""
    members = {one.worker_id: one for one in await list_members(deployed.deployment.registry)}
    receiver = members[worker_id]
    hello = handoff_pb2.Hello(
        worker_id="sender-9",
        incarnation=receiver.incarnation,
        decode_worker_id=worker_id,
        decode_incarnation=receiver.incarnation,
    )
    message = handoff_pb2.HandoffRequest(hello=hello).SerializeToString()
    async with open_channel(receiver.endpoint, Credentials(role=role)) as channel:
        return await status_of(channel, "/headrace.kv.v1.HandoffService/Handoff", message)


async def test_a_worker_publishes_its_own_memory_only(tmp_path: Path) -> None:
    token_file = tmp_path / "decode-9.token"
    token_file.write_text(create_token(load_local_key(), Role.DECODE, "decode-9", 600))
    async with suite(tmp_path, settings=FETCHES_NOTHING) as deployed:
        # A prefill worker that fetches nothing publishes none: nothing writes to its memory.
        assert await describe(deployed, "prefill-0", Role.DECODE) is grpc.StatusCode.NOT_FOUND
        descriptor = await describe(deployed, "decode-0", Role.PREFILL)
        assert isinstance(descriptor, layout_pb2.KvDescriptor)
        (victim,) = [
            one
            for one in await list_members(deployed.deployment.registry)
            if one.worker_id == "decode-0"
        ]
        put = registry_pb2.PutKvDescriptorRequest(
            lease_id="guessed",
            member=registry_pb2.MemberRef(
                worker_id=victim.worker_id, incarnation=victim.incarnation
            ),
            descriptor=descriptor,
        )
        credentials = Credentials(token_file=str(token_file))
        async with open_channel(deployed.deployment.registry, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await registry_stub(channel).PutKvDescriptor(put, timeout=_CALL_TIMEOUT_S)
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "the credential is for decode-9" in (raised.value.details() or "")


async def test_no_output_shows_the_addresses_of_memory(tmp_path: Path) -> None:
    debug = tuple(
        (service, "log_level", "debug") for service in ("registry", "router", "prefill", "decode")
    )
    async with suite(tmp_path, settings=debug, decode_count=2) as deployed:
        secrets: set[str] = set()
        for name in ("decode-0", "decode-1"):
            descriptor = await describe(deployed, name, Role.PREFILL)
            assert isinstance(descriptor, layout_pb2.KvDescriptor)
            secrets |= secrets_of(descriptor)
        outputs = [await output_of(deployed, seed) for seed in range(4)]
        # The transfers of the next requests fail, and their errors are recorded.
        with deployed.frozen("decode-0"):
            outputs += [await output_of(deployed, seed) for seed in range(4, 7)]
        deployed.kill("decode-1")
        outputs += [await output_of(deployed, seed) for seed in range(7, 10)]
        console = Console(width=200, record=True, file=io.StringIO())
        registry = deployed.deployment.registry
        rows = await member_rows(registry)
        console.print(workers_view(rows, console))
        outputs.append(json_text(workers_object(registry, rows)))
        outputs.append(console.export_text())
        outputs += map(str, await list_members(deployed.deployment.registry))
        logs = [child.spec.log_file for child in deployed.deployment.children]
        outputs += [log.read_text() for log in logs]
        assert any("KV bytes" in output for output in outputs), "no log has messages of transports"
    shown = {
        (secret, line)
        for secret in secrets
        for text in outputs
        for line in text.splitlines()
        if secret in line
    }
    assert not shown


async def output_of(deployed: Suite, seed: int) -> str:
    """The answer to a request or its error, and its trace."""
    try:
        answer = await deployed.generate(prompt_of(_REMOTE_TOKENS, seed), 4, timeout_s=8.0)
    except HeadraceError as error:
        return f"{error} {error.metadata}"
    return f"{answer.last} {await deployed.trace(answer.trace_id)}"
