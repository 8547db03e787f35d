"""The keys of routers, with which a decode worker verifies handoff tickets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.kv.v1 import handoff_pb2, prefix_pb2, prefix_pb2_grpc
from headrace.worker.v1 import worker_pb2
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.errors import (
    HeadraceError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
)
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tickets import SigningKey
from headrace_decode import attempts
from headrace_engine.worker import status
from tests.component.decode.conftest import Served, request
from tests.component.decode.prefill_rank import (
    PREFILL_REF,
    RESERVATION,
    ROUTER,
    PrefillRank,
    failure_of,
    next_event,
    ticket_of,
)
from tests.component.decode.scripted_engine import LAYOUT, REF
from tests.linked_call import LinkedCall
from tests.waiting import until


@pytest.fixture
def insecure() -> bool:
    """The caller has no role."""
    return False


async def check_accepted(channel: grpc.aio.Channel, asked: decode_pb2.GenerateRequest) -> None:
    call = LinkedCall(channel, asked, 5)
    assert await next_event(call) == "reserved"
    call.cancel()


async def test_a_router_s_remote_prefill_needs_a_key_that_its_status_stream_has_sent(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "KEY_WAIT_S", 0.1)
    key = SigningKey().public
    asked = request("x6", ticket_key_id=key.key_id)
    async with open_channel(served.endpoint, Credentials(role=Role.ROUTER)) as channel:
        router = replace(served, channel=channel)
        for unknown in (key.key_id, b""):
            error = await failure_of(router.generate(request("x6", ticket_key_id=unknown)))
            assert isinstance(error, Unauthenticated)
            assert error.metadata["ticket"] == "key_id"
        assert served.service.attempts.status().reserved_blocks == 0
        monkeypatch.setattr(attempts, "KEY_WAIT_S", 60.0)
        served.engine.play(replace(RESERVATION, transfer_id="x6"))
        accepted = asyncio.create_task(check_accepted(router.channel, asked))
        watch = router.worker.WatchStatus(
            worker_pb2.WatchStatusRequest(ticket_public_key=key.public_key)
        )
        assert await watch.read()
        await accepted
        watch.cancel()


async def test_the_status_streams_of_one_router_are_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "STATUS_STREAMS_OF_CALLER_MAX", 3)
    async with open_channel(served.endpoint, Credentials(role=Role.ROUTER)) as channel:
        stub = replace(served, channel=channel).worker
        open_calls = [stub.WatchStatus(worker_pb2.WatchStatusRequest()) for _ in range(3)]
        for call in open_calls:
            assert await call.read()
        refused = stub.WatchStatus(worker_pb2.WatchStatusRequest())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await refused.read()
        assert isinstance(error_from_rpc(raised.value), QueueFull)
        open_calls[0].cancel()

        async def admitted() -> bool:
            call = stub.WatchStatus(worker_pb2.WatchStatusRequest())
            try:
                return bool(await call.read())
            except grpc.aio.AioRpcError:
                return False
            finally:
                call.cancel()

        await until(admitted, 20, "room for a stream")


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.ROUTER])
async def test_only_a_router_gives_a_ticket_key(served: Served, role: Role) -> None:
    key = SigningKey().public
    async with open_channel(served.endpoint, Credentials(role=role)) as channel:
        stub = replace(served, channel=channel).worker

        async def first(public_key: bytes) -> HeadraceError | None:
            call = stub.WatchStatus(worker_pb2.WatchStatusRequest(ticket_public_key=public_key))
            try:
                assert await call.read()
            except grpc.aio.AioRpcError as error:
                return error_from_rpc(error)
            finally:
                call.cancel()
            return None

        assert await first(b"") is None
        error = await first(key.public_key)
        if role is Role.ROUTER:
            assert error is None
            assert ROUTER.known.find(key.key_id) is not None
            wrong = await first(b"short")
            assert isinstance(wrong, InvalidRequest)
            assert "ticket_public_key" in wrong.violations
        else:
            assert isinstance(error, PermissionDenied)
            assert error.metadata["field"] == "ticket_public_key"
            assert ROUTER.known.find(key.key_id) is None


async def test_a_router_s_key_is_forgotten_a_bounded_time_after_its_stream(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = SigningKey().public
    async with open_channel(served.endpoint, Credentials(role=Role.ROUTER)) as channel:
        call = replace(served, channel=channel).worker.WatchStatus(
            worker_pb2.WatchStatusRequest(ticket_public_key=key.public_key)
        )
        assert await call.read()
        monkeypatch.setattr(ROUTER.known, "_kept_s", 0.0)
        assert ROUTER.known.find(key.key_id) is not None, "the stream is open"
        call.cancel()
        await until(lambda: ROUTER.known.find(key.key_id) is None)


async def test_a_transfer_of_a_router_takes_tickets_of_that_router_only(
    served: Served,
) -> None:
    other = SigningKey()
    ROUTER.known.use(other.public.public_key)
    async with (
        open_channel(served.endpoint, Credentials(role=Role.ROUTER)) as channel,
        open_channel(served.endpoint, Credentials(role=Role.PREFILL)) as prefill,
    ):
        rank = PrefillRank(replace(served, channel=prefill).handoff)
        call = await replace(served, channel=channel).reserve(
            "x7", ticket_key_id=other.public.key_id
        )
        rank.send(open=handoff_pb2.Open(transfer_id="x7", ticket=ticket_of("x7")))
        refused = await rank.receive("cancel")
        assert refused.cancel.refused_claim == "key_id"
        ticket = ROUTER.ticket("x7", prefill=PREFILL_REF, decode=REF, layout=LAYOUT, key=other)
        rank.send(open=handoff_pb2.Open(transfer_id="x7", ticket=ticket))
        await rank.receive("reservation")
        rank.leave()
        call.cancel()


@pytest.mark.parametrize(
    ("role", "fields", "expected"),
    [
        (Role.PREFILL, {"target_transfer_id": "x9"}, PermissionDenied),
        (Role.ROUTER, {}, PermissionDenied),
        (Role.DECODE, {"target_transfer_id": "x9"}, PermissionDenied),
        (Role.ROUTER, {"target_transfer_id": "x9", "transfer_id": "x1"}, NotFound),
        # The last token has no KV.
        (Role.ROUTER, {"target_transfer_id": "x9", "end_token": 42}, InvalidRequest),
        # Of given tokens, without a request.
        (Role.PREFILL, {"transfer_id": "", "target_transfer_id": "x9"}, PermissionDenied),
        (Role.DECODE, {"transfer_id": "", "target_transfer_id": "x9"}, PermissionDenied),
        (Role.ROUTER, {"transfer_id": ""}, InvalidRequest),
        (Role.ROUTER, {"transfer_id": "", "target_transfer_id": "x9"}, InvalidRequest),
    ],
)
async def test_kv_of_an_answer_is_sent_to_a_decode_worker_for_routers_only(
    served: Served, role: Role, fields: dict[str, Any], expected: type[HeadraceError]
) -> None:
    asked = {"transfer_id": "x6", "end_token": 41, "generated_token_ids": [1, 2], **fields}
    async with (
        open_channel(served.endpoint, Credentials(role=Role.ROUTER)) as router,
        open_channel(served.endpoint, Credentials(role=role)) as channel,
    ):
        call = LinkedCall(router, request("x6", remote_prefill=False), 5)
        assert await next_event(call) == "reserved"
        stub = prefix_pb2_grpc.PrefixServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.SendPrefix(prefix_pb2.SendPrefixRequest(**asked), timeout=5)
        assert type(error_from_rpc(raised.value)) is expected
        call.cancel()
