"""Tickets that let a client call a decode worker."""

from __future__ import annotations

from dataclasses import replace

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.errors import DuplicateTransfer, HeadraceError, Unauthenticated
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


async def failure_of(served: Served, asked: decode_pb2.GenerateRequest) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in served.decode.Generate(asked, timeout=5):
            pass
    return error_from_rpc(raised.value)


async def check_accepted(served: Served, asked: decode_pb2.GenerateRequest) -> None:
    call = served.decode.Generate(asked, timeout=5)
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
    await check_accepted(served, signed("x1"))
    assert isinstance(await failure_of(served, signed("x1")), DuplicateTransfer)


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
    error = await failure_of(served, asked)
    assert isinstance(error, Unauthenticated)
    assert error.metadata["ticket"] == field
    assert served.service.status().reserved_blocks == 0
    served.service._seen.check(asked.transfer_id)


async def test_a_router_needs_no_ticket(served: Served) -> None:
    asked = request("x5", remote_prefill=False)
    async with open_channel(served.endpoint, Credentials(role=Role.ROUTER)) as channel:
        await check_accepted(replace(served, channel=channel), asked)
    async with open_channel(served.endpoint, Credentials(role=Role.PREFILL)) as channel:
        error = await failure_of(replace(served, channel=channel), asked)
    assert error.metadata["ticket"] == "missing"


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (request("x6", token_ids=[1] * 1_100_000), "INVALID_ARGUMENT"),
        (
            request("x7", sampling=sampling_pb2.SamplingParams(stop=[""] * 300_000)),
            "INVALID_ARGUMENT",
        ),
        (request("x8", token_ids=[1] * 9_000_000), "RESOURCE_EXHAUSTED"),
    ],
    ids=["bytes", "fields", "body"],
)
async def test_a_caller_without_a_ticket_sends_no_large_request(
    served: Served, asked: decode_pb2.GenerateRequest, status: str
) -> None:
    served.service._ticket_key = lambda: KEY
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in served.decode.Generate(asked, timeout=10):
            pass
    # A request that is parsed is refused for its ticket.
    assert raised.value.code().name == status
