"""Hostile members with valid credentials get the tokens of their callers. These are worth nothing anywhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import jwt
import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.client import list_members, worker_status
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import PROOF_KEY, TOKEN_KEY, Role
from headrace_common.access.tokens import HeldToken, new_private_key
from headrace_common.errors import HeadraceError
from headrace_common.rpc.channel import open_channel
from tests.suite.deployment import Suite, prompt_of, suite
from tests.waiting import until

Stolen = tuple[tuple[str, str], ...]
_REGISTRY = "/headrace.registry.v1.RegistryService/"
_ROLES = {
    registry_pb2.Member.ROLE_ROUTER: Role.ROUTER,
    registry_pb2.Member.ROLE_PREFILL: Role.PREFILL,
    registry_pb2.Member.ROLE_DECODE: Role.DECODE,
    registry_pb2.Member.ROLE_BOTH: Role.WORKER,
}
_CALLERS = {
    Role.ROUTER: {"prefill"},
    Role.PREFILL: {"operator", "planner", "router"},
    Role.DECODE: {"operator", "planner", "router"},
    Role.WORKER: {"operator", "planner", "router"},
}
# What a holder of each role could do at each service, if the service took its token.
_RIGHTS = {
    "registry": [f"{_REGISTRY}{name}" for name in ("SetPolicy", "ListMembers", "GetPolicy")],
    "router": [
        "/headrace.inference.v1.TraceService/ListTraces",
        "/headrace.inference.v1.LoadService/GetLoad",
        "/headrace.prefill.v1.PrefillQueueService/Pull",
        "/headrace.inference.v1.StoreService/UseEntry",
    ],
    "prefill": [f"/headrace.worker.v1.WorkerService/{name}" for name in ("WatchStatus", "Drain")],
    "decode": [
        "/headrace.decode.v1.DecodeService/Link",
        "/headrace.kv.v1.HandoffService/Handoff",
        "/headrace.worker.v1.WorkerService/SubscribeKvEvents",
    ],
}


class Thief(grpc.GenericRpcHandler):
    """Serves every RPC, answers none, and keeps the credentials of its callers by their role."""

    def __init__(self) -> None:
        self.stolen: dict[str, Stolen] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        kept = tuple(
            (name, str(value))
            for name, value in handler_call_details.invocation_metadata or ()
            if name in (TOKEN_KEY, PROOF_KEY)
        )
        token = dict(kept)[TOKEN_KEY]
        self.stolen[jwt.decode(token, options={"verify_signature": False})["role"]] = kept
        return grpc.stream_stream_rpc_method_handler(self._hold)

    async def _hold(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await asyncio.sleep(0.2)


@asynccontextmanager
async def thief() -> AsyncIterator[tuple[Thief, str]]:
    server, found = grpc.aio.server(), Thief()
    server.add_generic_rpc_handlers((found,))
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield found, endpoint
    finally:
        await server.stop(None)


async def register(
    registry: str,
    like: registry_pb2.Member,
    role: registry_pb2.Member.Role.ValueType,
    endpoint: str,
) -> None:
    member = registry_pb2.Member()
    member.CopyFrom(like)
    member.worker_id = f"thief-{_ROLES[role]}"
    member.incarnation = "00000000deadbeef"
    member.role, member.endpoint = role, endpoint
    member.registration_order = 0
    if role == registry_pb2.Member.ROLE_ROUTER:
        for name in ("layout", "model", "max_model_len", "max_num_seqs", "transport", "place"):
            member.ClearField(name)
    async with open_channel(registry, Credentials(role=_ROLES[role])) as channel:
        request = registry_pb2.RegisterRequest(member=member, ttl=Duration(seconds=60))
        await registry_pb2_grpc.RegistryServiceStub(channel).Register(request, timeout=5)


async def refusal(endpoint: str, method: str, stolen: Sequence[tuple[str, str]]) -> str:
    """The status and the detail of a call with stolen credentials."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        start_call: Any = channel.stream_stream(method)
        call = start_call(metadata=stolen, timeout=2)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        call.cancel()
    return "OK"


async def test_what_callers_send_to_a_hostile_member_is_refused_everywhere_else(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, planner=True) as deployed, AsyncExitStack() as held:
        registry = deployed.deployment.registry
        (like,) = [one for one in await list_members(registry) if one.worker_id == "decode-0"]
        thieves: dict[Role, Thief] = {}
        for role, name in _ROLES.items():
            thieves[name], endpoint = await held.enter_async_context(thief())
            await register(registry, like, role, endpoint)
            if role != registry_pb2.Member.ROLE_ROUTER:
                with pytest.raises(HeadraceError):
                    await worker_status(endpoint)
        for name, found in thieves.items():
            await until(partial(_CALLERS[name].issubset, found.stolen), 20)
            for caller, stolen in found.stolen.items():
                assert {name for name, _ in stolen} == {TOKEN_KEY, PROOF_KEY}, caller
                await check_refused(deployed, stolen)
        prompt = prompt_of(60, 1)
        assert (await deployed.generate(prompt, 6)).token_ids == deployed.expected(prompt, 6)


async def check_refused(deployed: Suite, stolen: Stolen) -> None:
    """With the proof, without it, and with one of the thief's own making, at every service."""
    (_, token), _ = stolen
    own = HeldToken.create(new_private_key(), Role.OPERATOR)
    for child in deployed.deployment.children:
        for method in _RIGHTS.get(child.spec.service, ()):
            for credential in (
                stolen,
                stolen[:1],
                ((TOKEN_KEY, token), (PROOF_KEY, own.proof(f"localhost:{child.endpoint[10:]}"))),
            ):
                assert "UNAUTHENTICATED" in await refusal(child.endpoint, method, credential), (
                    method,
                    child.spec.service,
                )
