"""A caller beyond its bounds is refused before its request arrives, and other callers are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.callers import bounds as bounds_module
from headrace_common.callers.bounds import (
    REFUSED_BODY,
    REFUSED_KEY,
    REFUSED_REJECTIONS,
    REFUSED_UNARY,
    CallerBounds,
    CallerLimits,
)
from headrace_common.client_config import ClientFacingConfig
from headrace_common.errors import HeadraceError, InvalidRequest, QueueFull, Unauthenticated
from headrace_common.process.open_connections import host_of_peer
from headrace_common.rpc import callers as interceptor
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

    async def Route(self, request: Any, context: Any) -> inference_pb2.RouteResponse:
        raise NotImplementedError

    async def Prefill(self, request: Any, context: Any) -> inference_pb2.PrefillResponse:
        raise NotImplementedError


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
async def _served(
    refused: Counter[str],
    rejected_per_s: float = 0.01,
    cpu_clock: Callable[[], float] = lambda: 0.0,
    unary_per_s: float = 1_000.0,
) -> AsyncIterator[_Served]:
    def count(refusal: str, number: int) -> None:
        refused[refusal] += number

    removed: set[str] = set()

    def tenant_of(metadata: Any) -> str:
        tenant = str(dict(metadata).get("x-tenant", ""))
        return "" if tenant in removed else tenant

    limits = CallerLimits(_CALLS_MAX, rejected_per_s, _CHECK_S, unary_per_s)
    # The clock stands still, so that the speed of the machine does not matter.
    servicer, bounds = _Servicer(), CallerBounds(limits, count, lambda: 0.0, cpu_clock)
    clients = ClientServices((_SERVICE,), callers=bounds, tenant_of=tenant_of)
    server = GrpcServer(ClientFacingConfig(), (), clients)
    assert server.client_server is not None
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.client_server)
    await server.start()
    async with open_channel(server.client_endpoint) as channel:
        yield _Served(channel, servicer, bounds, removed)
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
        other = asyncio.create_task(it.ask("b"))
        await until(lambda: it.bounds.calls("tenant:b") == 1, _WAIT_S)
        it.servicer.release.set()
        assert await asyncio.gather(*held, other) == ["answer"] * 3
        # Both have ended, so there is room again.
        await until(lambda: not it.bounds.calls("tenant:a"), _WAIT_S)
        assert await it.ask("a") == "answer"


async def test_a_tenant_of_many_invalid_requests_is_refused_and_another_is_not() -> None:
    refused: Counter[str] = Counter()
    wrong = inference_pb2.GenerateRequest(text="no").SerializeToString()
    async with _served(refused) as it:
        it.servicer.release.set()
        errors = [await _error_of(it.ask("a", wrong)) for _ in range(5)]
        assert {type(error) for error in errors} == {InvalidRequest, QueueFull}
        refused_one = next(error for error in errors if isinstance(error, QueueFull))
        assert "calls a second of this caller were rejected" in refused_one.detail
        assert await it.ask("b") == "answer"


async def test_a_refused_call_that_waits_receives_nothing_and_ends_with_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds_module, "_REFUSAL_WAIT_S", 600.0)
    refused: Counter[str] = Counter()
    wrong = inference_pb2.GenerateRequest(text="no").SerializeToString()
    async with _served(refused, rejected_per_s=0.5) as it:
        it.servicer.release.set()
        assert isinstance(await _error_of(it.ask("a", wrong)), InvalidRequest)
        waiting = asyncio.create_task(it.ask("a", bytes(MESSAGE_BYTES_MAX - 1_000)))
        await until(lambda: refused[REFUSED_REJECTIONS] == 1, _WAIT_S)
        assert it.bounds.calls("tenant:a") == 1
        assert await it.ask("b") == "answer"
        waiting.cancel()
        await until(lambda: not it.bounds.calls("tenant:a"), _WAIT_S)
        assert refused == {REFUSED_REJECTIONS: 1}


async def test_unary_calls_beyond_the_rate_are_refused_before_their_request_arrives() -> None:
    refused: Counter[str] = Counter()
    async with _served(refused, unary_per_s=1.0) as it:
        it.servicer.release.set()
        models: Any = it.channel.stream_unary(f"/{_SERVICE}/ListModels")
        metadata = (("x-tenant", "a"),)
        for _ in range(3):
            assert await models([b""], metadata=metadata, timeout=_WAIT_S)
        # It never sends a request.
        call = models(metadata=metadata, timeout=_WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = error_from_rpc(caught.value)
        assert isinstance(error, QueueFull)
        assert error.retry_after_s == pytest.approx(1.0)
        assert dict(error.metadata)["queue"] == "unary calls"
        trailers = dict(await call.trailing_metadata() or ())
        assert trailers["grpc-retry-pushback-ms"] == "1000"
        assert refused == {REFUSED_UNARY: 1}
        # Streams and other callers go on.
        assert await it.ask("a") == "answer"
        assert await models([b""], metadata=(("x-tenant", "b"),), timeout=_WAIT_S)


@pytest.mark.parametrize("cause", ["few and small", "large", "slow"])
async def test_a_costly_invalid_request_exhausts_what_small_ones_do_not(cause: str) -> None:
    text = "no" * (4 * 1024 * 1024 if cause == "large" else 1)
    wrong = inference_pb2.GenerateRequest(text=text).SerializeToString()
    ticks = iter(range(1_000))

    def cpu_clock() -> float:
        return float(next(ticks)) if cause == "slow" else 0.0

    async with _served(Counter(), 10.0, cpu_clock) as it:
        assert isinstance(await _error_of(it.ask("a", wrong)), InvalidRequest)
        error = await _error_of(it.ask("a", wrong))
        assert isinstance(error, InvalidRequest if cause == "few and small" else QueueFull)


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
        missing = generate(timeout=_WAIT_S)
        await missing.done_writing()
        assert await missing.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused[REFUSED_BODY] == 1


async def test_a_unary_request_that_cannot_be_parsed_is_invalid() -> None:
    async with _served(Counter()) as it:
        assert isinstance(await _error_of(it.ask("a", b"\xff\xff")), InvalidRequest)
        models: Any = it.channel.unary_unary(f"/{_SERVICE}/ListModels")
        response = inference_pb2.ListModelsResponse.FromString(await models(b"", timeout=_WAIT_S))
        assert response.prefix_key_fingerprint == 7


def test_callers_are_tenants_or_hosts() -> None:
    assert host_of_peer("ipv4:10.0.0.7:40112") == "10.0.0.7"
    assert host_of_peer("ipv6:%5B2001:db8::7%5D:40112") == "2001:db8::/64"
    assert host_of_peer("ipv6:%5B::ffff:10.0.0.7%5D:40112") == "10.0.0.7"
    assert interceptor.caller_name("", "10.0.0.7") == "10.0.0.7"
    # A tenant may have the name of a host.
    assert interceptor.caller_name("10.0.0.7", "10.0.0.9") == "tenant:10.0.0.7"
