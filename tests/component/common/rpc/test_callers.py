"""A caller beyond its bounds is refused before its request arrives, and other callers are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.callers import bounds as callers
from headrace_common.callers.bounds import (
    REFUSED_BODY,
    REFUSED_CALLS,
    REFUSED_KEY,
    CallerBounds,
    InputMemory,
    host_of_peer,
)
from headrace_common.client_config import ClientFacingConfig
from headrace_common.errors import HeadraceError, InvalidRequest, QueueFull, Unauthenticated
from headrace_common.rpc import access as interceptor
from headrace_common.rpc import server as server_module
from headrace_common.rpc.channel import MESSAGE_BYTES_MAX, open_channel
from headrace_common.rpc.server import ClientServices, GrpcServer
from headrace_common.rpc.status import error_from_rpc
from tests.waiting import until

_SERVICE = "headrace.inference.v1.InferenceService"
_CALLS_MAX = 2
_WAIT_S = 20.0
_CHECK_S = 0.05


class _Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers an empty text when `release` is set, and rejects any other."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if request.text:
            raise InvalidRequest({"text": "must be empty"})
        await self.release.wait()
        yield inference_pb2.GenerateResponse(text="answer")

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(prefix_key_fingerprint=7)


class _Served:
    """`removed`: tenants of which no key is known any more."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        servicer: _Servicer,
        bounds: CallerBounds,
        removed: set[str],
    ) -> None:
        self.channel, self.servicer, self.bounds, self.removed = channel, servicer, bounds, removed
        self._generate: Any = channel.unary_stream(f"/{_SERVICE}/Generate")

    async def ask(self, tenant: str, body: bytes = b"") -> str:
        """The text of the answer. Raises HeadraceError."""
        metadata = (("x-tenant", tenant),)
        try:
            data = [one async for one in self._generate(body, metadata=metadata, timeout=_WAIT_S)]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return inference_pb2.GenerateResponse.FromString(data[0]).text


@asynccontextmanager
async def _served(refused: Counter[str]) -> AsyncIterator[_Served]:
    def count(refusal: str, number: int) -> None:
        refused[refusal] += number

    removed: set[str] = set()

    def tenant_of(metadata: Any) -> str:
        tenant = str(dict(metadata).get("x-tenant", ""))
        return "" if tenant in removed else tenant

    servicer = _Servicer()  # type: ignore[abstract]
    bounds = CallerBounds(_CALLS_MAX, count, check_s=_CHECK_S)
    clients = ClientServices((_SERVICE,), callers=bounds, tenant_of=tenant_of)
    server = GrpcServer(ClientFacingConfig(), (), clients)
    assert server.client_server is not None
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.client_server)
    await server.start()
    try:
        async with open_channel(server.client_endpoint) as channel:
            yield _Served(channel, servicer, bounds, removed)
    finally:
        await server.stop(0)


async def _error_of(asking: Any) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        await asking
    return caught.value


async def test_the_calls_of_a_tenant_are_bounded_before_the_next_request_arrives() -> None:
    refused: Counter[str] = Counter()
    async with _served(refused) as it:
        held = [asyncio.create_task(it.ask("a")) for _ in range(_CALLS_MAX)]
        await until(lambda: it.bounds.calls("tenant:a") == _CALLS_MAX, _WAIT_S)
        error = await _error_of(it.ask("a", bytes(MESSAGE_BYTES_MAX - 1_000)))
        assert isinstance(error, QueueFull)
        assert "2 calls of this caller are in flight" in error.detail
        assert "max_concurrent_requests" in error.detail
        assert refused == {REFUSED_CALLS: 1}
        other = asyncio.create_task(it.ask("b"))
        await until(lambda: it.bounds.calls("tenant:b") == 1, _WAIT_S)
        it.servicer.release.set()
        assert await asyncio.gather(*held, other) == ["answer"] * 3
        # Both have ended, so there is room again.
        await until(lambda: not it.bounds.calls("tenant:a"), _WAIT_S)
        assert await it.ask("a") == "answer"


async def test_streams_of_requests_are_bounded_too() -> None:
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with _served(Counter()) as it:
        stream: Any = it.channel.stream_stream(reflection)
        held = [stream(metadata=(("x-tenant", "a"),), timeout=_WAIT_S) for _ in range(_CALLS_MAX)]
        await until(lambda: it.bounds.calls("tenant:a") == _CALLS_MAX, _WAIT_S)
        refused = stream(metadata=(("x-tenant", "a"),), timeout=_WAIT_S)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in held:
            call.cancel()


async def test_a_request_is_parsed_in_the_turn_of_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _served(Counter()) as it:
        turn, waits = asyncio.Event(), asyncio.Event()

        async def wait_turn() -> None:
            waits.set()
            await turn.wait()

        monkeypatch.setattr(it.bounds, "wait_turn", wait_turn)
        asking = asyncio.create_task(_error_of(it.ask("a", b"\xff\xff")))
        await asyncio.wait_for(waits.wait(), _WAIT_S)
        assert not asking.done()
        turn.set()
        assert isinstance(await asking, InvalidRequest)


async def test_the_bytes_of_requests_count_for_their_caller_on_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest request of the caller with most bytes is refused, and small ones are not counted."""
    monkeypatch.setattr(callers, "_INPUT", memory := InputMemory(2**22))
    tokens = inference_pb2.TokenIds(ids=[1] * 2**21)
    body = inference_pb2.GenerateRequest(generated=tokens).SerializeToString()
    async with _served(Counter()) as it:
        first = asyncio.create_task(it.ask("a", body))
        await until(lambda: memory.bytes == len(body), _WAIT_S)
        others = [asyncio.create_task(it.ask("b", body)), asyncio.create_task(it.ask("b"))]
        await until(lambda: it.bounds.calls("tenant:b") == 2, _WAIT_S)
        error = await _error_of(first)
        assert isinstance(error, QueueFull)
        assert error.metadata["queue"] == "input"
        it.servicer.release.set()
        assert await asyncio.gather(*others) == ["answer"] * 2
        await until(lambda: memory.bytes == 0, _WAIT_S)


async def test_few_requests_of_a_caller_are_received_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interceptor, "READS_MAX", 1)
    async with _served(Counter()) as it:
        generate: Any = it.channel.stream_stream(f"/{_SERVICE}/Generate")
        slow = generate(metadata=(("x-tenant", "a"),), timeout=_WAIT_S)
        await until(lambda: it.bounds.calls("tenant:a") == 1, _WAIT_S)
        waiting = asyncio.create_task(it.ask("a"))
        await until(lambda: it.bounds.calls("tenant:a") == 2, _WAIT_S)
        it.servicer.release.set()
        assert await it.ask("b") == "answer"
        assert not waiting.done()
        slow.cancel()
        assert await waiting == "answer"


async def test_an_open_call_ends_after_its_key_was_removed() -> None:
    refused: Counter[str] = Counter()
    async with _served(refused) as it:
        ended, other = (asyncio.create_task(it.ask(tenant)) for tenant in "ab")
        await until(lambda: it.bounds.calls("tenant:a") + it.bounds.calls("tenant:b") == 2, _WAIT_S)
        it.removed.add("a")
        error = await _error_of(ended)
        assert isinstance(error, Unauthenticated)
        assert "was removed while its request ran" in error.detail
        assert refused == {REFUSED_KEY: 1}
        it.servicer.release.set()
        assert await other == "answer"


async def test_a_request_that_does_not_arrive_ends_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interceptor, "BODY_WAIT_S", 0.1)
    refused: Counter[str] = Counter()
    async with _served(refused) as it:
        generate: Any = it.channel.stream_stream(f"/{_SERVICE}/Generate")
        call = generate(timeout=_WAIT_S)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive within 0.1 s" in await call.details()
        monkeypatch.setattr(interceptor, "BODY_WAIT_S", _WAIT_S)
        missing = generate(timeout=_WAIT_S)
        await missing.done_writing()
        assert await missing.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused[REFUSED_BODY] == 1


async def test_an_endless_stream_ends_by_its_age_and_an_answer_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "CLIENT_CONNECTION_AGE_S", 0.3)
    async with _served(Counter()) as it:
        asking = asyncio.create_task(it.ask("a"))
        await until(lambda: it.bounds.calls("tenant:a") == 1, _WAIT_S)
        # The server never ends a health stream by itself.
        watch: Any = it.channel.unary_stream("/grpc.health.v1.Health/Watch")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in watch(b"", timeout=_WAIT_S):
                pass
        # Its own deadline has another detail.
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "lasts 0.3 s here" in str(ended.value.details())
        assert not asking.done()
        it.servicer.release.set()
        assert await asking == "answer"


def test_callers_are_tenants_or_hosts() -> None:
    assert host_of_peer("ipv4:10.0.0.7:40112") == "10.0.0.7"
    assert host_of_peer("ipv6:%5B2001:db8::7%5D:40112") == "2001:db8::/64"
    assert host_of_peer("ipv6:%5B::ffff:10.0.0.7%5D:40112") == "10.0.0.7"
    assert interceptor.caller_name("", "10.0.0.7") == "10.0.0.7"
    # A tenant may have the name of a host.
    assert interceptor.caller_name("10.0.0.7", "10.0.0.9") == "tenant:10.0.0.7"
