"""Route, and clients that stream from decode workers with a ticket."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, priority_pb2
from headrace.kv.v1 import handoff_pb2
from headrace.registry.v1 import registry_pb2
from headrace_client import Client, build_request
from headrace_client.progress import Progress
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    DuplicateTransfer,
    HeadraceError,
    InvalidRequest,
    NoDecodeWorker,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
    WorkerGone,
)
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tickets.direct import TicketSigner, check_ticket
from headrace_common.tickets.direct_request import decode_request_of
from headrace_kv.layout.layout import WorkerRef
from headrace_router.workers import connection
from tests.component.router.fakes import (
    FakeDecode,
    Rig,
    fail,
    full,
    hand_over,
    hang,
    reply,
    stall,
)
from tests.router_key import RouterKey
from tests.waiting import until

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
PROMPT = b"a prompt"


@pytest.fixture
async def open_rig() -> AsyncIterator[Rig]:
    """A router that allows look-aside."""
    rig = await Rig(look_aside=True).start()
    yield rig
    await rig.close()


async def route(rig: Rig, *, explain: bool = False, **fields: Any) -> inference_pb2.RouteResponse:
    request = inference_pb2.GenerateRequest(text=PROMPT.decode(), **fields)
    stub = rig.operator_stub if explain else rig.stub
    routed: inference_pb2.RouteResponse = await stub.Route(
        inference_pb2.RouteRequest(request=request, explain=explain), timeout=5
    )
    return routed


async def open_route(endpoint: str, request: inference_pb2.RouteRequest) -> None:
    """Calls Route without a credential."""
    async with open_channel(endpoint) as channel:
        await inference_pb2_grpc.InferenceServiceStub(channel).Route(request, timeout=5)


async def test_a_worker_without_a_client_listener_gets_no_direct_request(open_rig: Rig) -> None:
    worker = await open_rig.add_decode(reply("abc"))
    assert (await route(open_rig)).direct.endpoint == worker.member.client_endpoint
    member = registry_pb2.Member()
    member.CopyFrom(worker.member)
    member.client_endpoint = ""
    worker.member = member
    open_rig.refresh()
    assert not (await route(open_rig)).HasField("direct")


async def prefill_error(rig: Rig, direct: inference_pb2.DirectRequest) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.stub.Prefill(inference_pb2.PrefillRequest(direct=direct), timeout=5)
    return error_from_rpc(raised.value)


async def tokens_of(client: Client, **options: Any) -> tuple[bytes, list[Any]]:
    responses = [
        response
        async for response in client.generate(
            PROMPT.decode(), tokens_only=True, timeout_s=10, **options
        )
    ]
    return bytes(token for response in responses for token in response.token_ids), responses


async def test_an_explanation_lists_costs_and_reserves_no_load(open_rig: Rig) -> None:
    workers = [await open_rig.add_decode(reply("abc")) for _ in range(3)]
    routed = await route(open_rig, explain=True)
    assert {candidate.worker_id for candidate in routed.candidates} == {"d0", "d1", "d2"}
    chosen = routed.candidates[0]
    assert chosen.worker_id == routed.worker_id
    assert (chosen.missing_tokens, chosen.cached_tokens) == (len(PROMPT) - 1, 0)
    assert chosen.cost == pytest.approx(4 * chosen.missing_tokens + chosen.held_tokens)
    assert "local prefill" in routed.explanation
    assert not routed.HasField("direct")
    assert not any(worker.requests for worker in workers)
    assert not open_rig.router.workers.table("sim").requests.any()


@pytest.mark.parametrize("rig", [{"look_aside": True, "insecure": False}], indirect=True)
async def test_only_operators_learn_what_the_candidates_cache(rig: Rig) -> None:
    await rig.add_decode(reply("abc"))
    asked = inference_pb2.RouteRequest(
        request=inference_pb2.GenerateRequest(text=PROMPT.decode()), explain=True
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.stub.Route(asked, timeout=5)
    assert isinstance(error_from_rpc(raised.value), PermissionDenied)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await open_route(rig.internal_endpoint, asked)
    assert isinstance(error_from_rpc(raised.value), Unauthenticated)
    asked.explain = False
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.operator_stub.Route(asked, timeout=5)
    assert isinstance(error_from_rpc(raised.value), InvalidRequest)
    assert [one.worker_id for one in (await route(rig, explain=True)).candidates] == ["d0"]
    routed = await route(rig)
    assert routed.HasField("direct")
    assert (routed.worker_id, routed.explanation, len(routed.candidates)) == ("d0", "", 0)


async def test_without_look_aside_there_is_no_ticket(rig: Rig) -> None:
    await rig.add_decode(reply("abc"))
    assert not (await route(rig)).HasField("direct")
    async with Client(rig.endpoint, look_aside=True) as client:
        assert (await tokens_of(client))[0] == b"abc"
        assert client.direct_answers == 0


async def test_route_fails_with_the_same_errors_as_generate(open_rig: Rig) -> None:
    for request, expected in (("x", NoDecodeWorker), ("", InvalidRequest)):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await open_rig.stub.Route(
                inference_pb2.RouteRequest(request=inference_pb2.GenerateRequest(text=request))
            )
        assert isinstance(error_from_rpc(raised.value), expected)


async def test_a_ticket_is_for_the_request_and_counts_on_its_worker(open_rig: Rig) -> None:
    worker = await open_rig.add_decode(reply("abc"))
    direct = (await route(open_rig, request_id="mine")).direct
    assert direct.endpoint == worker.member.client_endpoint
    assert bytes(direct.token_ids) == PROMPT
    claims = check_ticket(open_rig.router_key.known.find, decode_request_of(direct), "d0")
    assert claims.tenant == ""
    assert open_rig.router.workers.table("sim").requests.sum() == 1


async def test_requests_with_stop_texts_go_through_the_router(open_rig: Rig) -> None:
    await open_rig.add_decode(reply("abcdef"))
    async with Client(open_rig.endpoint, look_aside=True) as client:
        responses = [
            response
            async for response in client.generate("x", stop=["c"], tokens_only=True, timeout_s=10)
        ]
        assert "".join(response.text for response in responses) == "ab"
        assert client.direct_answers == 0


async def test_calls_of_the_router_name_its_key_and_carry_no_ticket(open_rig: Rig) -> None:
    worker = await open_rig.add_decode(reply("abc"))
    await open_rig.ask()
    (request,) = worker.requests
    assert request.ticket == b""
    assert request.ticket_key_id == open_rig.router_key.key_id
    assert worker.ticket_public_keys == [open_rig.router_key.key.public.public_key]


@pytest.mark.parametrize("remote", [False, True])
async def test_tokens_stream_directly_from_the_decode_worker(open_rig: Rig, remote: bool) -> None:
    worker = await open_rig.add_decode(reply("hello"))
    if remote:
        await open_rig.add_prefill(hand_over)
    async with Client(open_rig.endpoint, look_aside=True) as client:
        tokens, responses = await tokens_of(client)
        assert tokens == b"hello"
        assert client.direct_answers == 1
    (received,) = worker.requests
    assert received.remote_prefill is remote
    check_ticket(open_rig.router_key.known.find, received, "d0")
    last = responses[-1]
    assert last.finish_reason
    assert last.usage.prompt_tokens == len(PROMPT)
    assert last.usage.completion_tokens == 5
    assert last.usage.transferred_tokens == (len(PROMPT) - 1 if remote else 0)
    assert last.timing.prefill_worker_id == ("p0" if remote else "")
    assert responses[0].trace_id in worker.metadata[0]["traceparent"]


async def test_the_router_retries_a_failed_prefill(open_rig: Rig) -> None:
    worker = await open_rig.add_decode(reply("hello"))
    await open_rig.add_prefill(fail("TRANSFER_FAILED"))
    async with Client(open_rig.endpoint, look_aside=True) as client:
        assert (await tokens_of(client))[0] == b"hello"
        assert client.direct_answers == 0
    assert worker.requests[0].remote_prefill is True
    assert worker.requests[-1].remote_prefill is False
    await until(lambda: worker.requests[0].transfer_id in worker.cancelled)


async def test_a_client_of_a_full_worker_sends_its_request_to_the_router(open_rig: Rig) -> None:
    turns = iter((full, reply("later")))

    async def script(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
        async for event in next(turns)(worker, request):
            yield event

    await open_rig.add_decode(script)
    async with Client(open_rig.endpoint, look_aside=True) as client:
        assert (await tokens_of(client))[0] == b"later"


async def test_unreachable_workers_are_reached_through_the_router(open_rig: Rig) -> None:
    await open_rig.add_decode(reply("hello"))
    async with Client(open_rig.endpoint, look_aside=True) as client:
        request = build_request("x")
        routed = await client.route(request)
        routed.direct.endpoint = "127.0.0.1:1"
        with pytest.raises(WorkerGone):
            async for _ in client._from_worker(routed, Progress(request), Deadline.after(5)):
                pass
        assert (await tokens_of(client))[0] == b"hello"
        assert client.direct_answers == 0


async def test_a_prompt_is_queued_once_and_only_with_its_ticket(open_rig: Rig) -> None:
    await open_rig.add_decode(hang)
    prefill = await open_rig.add_prefill(stall)
    direct = (await route(open_rig, prefill_placement=REMOTE)).direct
    assert direct.remote_prefill
    changed = inference_pb2.DirectRequest()
    changed.CopyFrom(direct)
    changed.token_ids[0] += 1
    assert isinstance(await prefill_error(open_rig, changed), Unauthenticated)
    changed.CopyFrom(direct)
    changed.priority = priority_pb2.PRIORITY_HIGH
    assert isinstance(await prefill_error(open_rig, changed), Unauthenticated)
    call = open_rig.stub.Prefill(inference_pb2.PrefillRequest(direct=direct), timeout=5)
    await until(lambda: len(prefill.tasks) == 1)
    assert prefill.tasks[0].transfer_id == direct.transfer_id
    assert isinstance(await prefill_error(open_rig, direct), DuplicateTransfer)
    call.cancel()
    await until(lambda: prefill.cancels == [direct.transfer_id])
    assert len(prefill.tasks) == 1


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0])
async def test_a_prompt_for_a_worker_with_a_wrong_clock_is_queued(
    open_rig: Rig, offset_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOCK_SET_PAUSE_S", 0.1)
    decode = await open_rig.add_decode(hang)
    decode.clock_offset_s = offset_s
    offsets = open_rig.router.workers.clock_offsets_s
    await until(lambda: abs(offsets().get("d0", 0.0) - offset_s) < 1)
    await open_rig.add_prefill(hand_over)
    ref = WorkerRef("d0", decode.member.incarnation)
    await until(lambda: open_rig.router.workers.accepts_tickets(ref))
    direct = (await route(open_rig, prefill_placement=REMOTE)).direct
    assert direct.ticket_lifetime.ToSeconds() == 10
    done = await open_rig.stub.Prefill(inference_pb2.PrefillRequest(direct=direct), timeout=5)
    assert done.worker_id == "p0"


async def test_a_reservation_may_be_sent_to_another_router_also_after_its_own_has_left(
    open_rig: Rig,
) -> None:
    worker = await open_rig.add_decode(hang)
    await open_rig.add_prefill(hand_over)
    direct = (await route(open_rig, prefill_placement=REMOTE)).direct
    other = await Rig(look_aside=True).start()
    try:
        other.router.update([worker.member])
        prefill = await other.add_prefill(hand_over)
        error = await prefill_error(other, direct)
        assert isinstance(error, Unauthenticated)
        assert error.metadata["ticket"] == "key_id"
        granting = registry_pb2.Member(
            role=registry_pb2.Member.ROLE_ROUTER,
            worker_id="router-1",
            ticket_public_key=open_rig.router_key.key.public.public_key,
        )
        wrong = registry_pb2.Member(
            role=registry_pb2.Member.ROLE_ROUTER, worker_id="router-2", ticket_public_key=b"short"
        )
        other.router.update([worker.member, granting, wrong])
        other.router.update([worker.member])
        done = await other.stub.Prefill(inference_pb2.PrefillRequest(direct=direct), timeout=5)
        assert done.worker_id == "p0"
        # The router that queues the prompt signs for it.
        (task,) = prefill.tasks
        ticket = handoff_pb2.HandoffTicket.FromString(task.handoff_ticket)
        assert ticket.key_id == other.router_key.key_id
    finally:
        await other.close()


async def test_a_key_of_a_worker_is_no_key_of_a_router(open_rig: Rig) -> None:
    worker = await open_rig.add_decode(hang)
    await open_rig.add_prefill(hand_over)
    forger = RouterKey()
    worker.member.ticket_public_key = forger.key.public.public_key
    open_rig.refresh()
    direct = (await route(open_rig, prefill_placement=REMOTE)).direct
    direct.ticket = TicketSigner(forger.key, 10.0).sign(decode_request_of(direct), "d0", "default")
    error = await prefill_error(open_rig, direct)
    assert isinstance(error, Unauthenticated)
    assert error.metadata["ticket"] == "key_id"


async def test_a_prompt_with_local_prefill_is_not_queued(open_rig: Rig) -> None:
    await open_rig.add_decode(hang)
    assert isinstance(await prefill_error(open_rig, (await route(open_rig)).direct), InvalidRequest)


async def test_the_client_retries_a_full_router_after_the_retry_delay() -> None:
    rig = await Rig(max_concurrent_requests=1).start()
    try:
        gate = asyncio.Event()

        async def script(
            worker: FakeDecode, request: decode_pb2.GenerateRequest
        ) -> AsyncIterator[Any]:
            await gate.wait()
            async for event in reply("ok")(worker, request):
                yield event

        worker = await rig.add_decode(script)
        async with Client(rig.endpoint) as client, Client(rig.endpoint, retries_max=0) as hasty:
            first = asyncio.create_task(tokens_of(client))
            await until(lambda: len(worker.requests) == 1)
            with pytest.raises(QueueFull):
                await tokens_of(hasty)
            second = asyncio.create_task(tokens_of(client))
            await asyncio.sleep(0.05)
            gate.set()
            assert [(await task)[0] for task in (first, second)] == [b"ok", b"ok"]
    finally:
        await rig.close()


def test_a_request_has_one_kind_of_prompt() -> None:
    assert build_request(tokens=[1, 2]).tokens.ids == [1, 2]
    assert build_request(messages=[("user", "x")]).chat.messages[0].role == "user"
    for arguments in ({}, {"prompt": "x", "tokens": [1]}):
        with pytest.raises(InvalidRequest):
            build_request(**arguments)  # type: ignore[arg-type]


async def test_the_command_line_lists_the_candidates(rig: Rig) -> None:
    for _ in range(3):
        await rig.add_decode(reply("abc"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "headrace_cli", "route", "--explain", "a prompt"),
        *("--router", rig.endpoint, "--internal", rig.internal_endpoint),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, complaints = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, complaints.decode()
    lines = output.decode().splitlines()
    chosen = lines[0].partition(",")[0]
    assert "prefilled there" in lines[0]
    assert any({"missing", "held", "requests"} <= set(line.split()) for line in lines[1:])
    rows = [line.split() for line in lines[1:]]
    assert any(row[:2] == ["*", chosen] for row in rows)
    assert {"d0", "d1", "d2"} <= {word for row in rows for word in row}
