"""Tickets that let a client call a decode worker."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import TOKEN_KEY, Role
from headrace_common.errors import (
    DuplicateTransfer,
    HeadraceError,
    PermissionDenied,
    Unauthenticated,
)
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_common.rpc.tickets import TicketSigner
from tests.component.decode.conftest import Served, request
from tests.component.decode.scripted_engine import REF

KEY = bytes(range(32))


@pytest.fixture
def insecure() -> bool:
    """The caller has no role."""
    return False


async def failure_of(channel: grpc.aio.Channel, asked: decode_pb2.GenerateRequest) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in decode_pb2_grpc.DecodeServiceStub(channel).Generate(asked, timeout=5):
            pass
    return error_from_rpc(raised.value)


async def check_accepted(channel: grpc.aio.Channel, asked: decode_pb2.GenerateRequest) -> None:
    call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(asked, timeout=5)
    first = await call.read()
    assert isinstance(first, decode_pb2.GenerateResponse)
    assert first.WhichOneof("event") == "reserved"
    call.cancel()


def signed(
    name: str, worker_id: str = REF.worker_id, ttl_s: float = 600
) -> decode_pb2.GenerateRequest:
    asked = request(name, remote_prefill=False)
    asked.ticket = TicketSigner(lambda: KEY, ttl_s).sign(asked, worker_id, "default")
    return asked


async def test_a_ticket_is_valid_once(served: Served) -> None:
    served.service._ticket_key = lambda: KEY
    await check_accepted(served.client_channel, signed("x1"))
    error = await failure_of(served.client_channel, signed("x1"))
    assert isinstance(error, DuplicateTransfer)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request("x2"), "missing"),
        (signed("x3", "decode-9"), "worker_id"),
        (signed("x4", ttl_s=-1), "expiry"),
    ],
)
async def test_an_invalid_ticket_is_refused_before_resources_are_spent(
    served: Served, asked: decode_pb2.GenerateRequest, field: str
) -> None:
    served.service._ticket_key = lambda: KEY
    error = await failure_of(served.client_channel, asked)
    assert isinstance(error, Unauthenticated)
    assert error.metadata["ticket"] == field
    assert served.service.status().reserved_blocks == 0
    served.service._seen.check(asked.transfer_id)


async def test_a_router_needs_no_ticket_on_the_internal_listener_only(served: Served) -> None:
    asked = request("x5", remote_prefill=False)
    async with open_channel(served.endpoint, Credentials(role=Role.ROUTER)) as channel:
        await check_accepted(channel, asked)
    # A ticket is no credential there.
    served.service._ticket_key = lambda: KEY
    assert isinstance(await failure_of(served.channel, signed("x6")), Unauthenticated)
    async with open_channel(served.endpoint, Credentials(role=Role.PREFILL)) as channel:
        assert isinstance(await failure_of(channel, signed("x7")), PermissionDenied)
    with_role: Any = served.client_channel.unary_stream(
        "/headrace.decode.v1.DecodeService/Generate"
    )
    token = Credentials(role=Role.ROUTER).token_for("127.0.0.1:1")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await with_role(asked.SerializeToString(), metadata=((TOKEN_KEY, token),)).read()
    assert error_from_rpc(raised.value).metadata["ticket"] == "missing"
