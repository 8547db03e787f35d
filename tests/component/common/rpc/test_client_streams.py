"""The client listener ends endless streams by age, and answers go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.client_config import ClientFacingConfig
from headrace_common.rpc import server
from headrace_common.rpc.server import ClientServices, GrpcServer
from tests.waiting import until

_SERVICE = "headrace.inference.v1.InferenceService"
_WAIT_S = 20.0


class _Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.calls = 0

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.calls += 1
        await self.release.wait()
        yield inference_pb2.GenerateResponse(text="answer")

    async def ListModels(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Route(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Prefill(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


class _Served:
    def __init__(self, endpoint: str, servicer: _Servicer) -> None:
        self.endpoint, self.servicer = endpoint, servicer

    def channel(self) -> grpc.aio.Channel:
        """A channel with a connection of its own, without any retry."""
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        return grpc.aio.insecure_channel(self.endpoint, options)

    async def ask(self, channel: grpc.aio.Channel) -> str:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(), timeout=_WAIT_S)
        return "".join([response.text async for response in call])


@asynccontextmanager
async def _served() -> AsyncIterator[_Served]:
    served = GrpcServer(ClientFacingConfig(), (), ClientServices((_SERVICE,)))
    assert served.client_server is not None
    servicer = _Servicer()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, served.client_server)
    await served.start()
    try:
        yield _Served(served.client_endpoint, servicer)
    finally:
        await served.stop(0)


async def _status_at_end(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
    """How a health stream ends, which the server never ends by itself."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=_WAIT_S)
    try:
        async for _ in watch:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def test_an_endless_stream_ends_by_its_age_and_an_answer_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "CLIENT_CONNECTION_AGE_S", 0.3)
    async with _served() as it, it.channel() as channel:
        asking = asyncio.create_task(it.ask(channel))
        await until(lambda: it.servicer.calls == 1, _WAIT_S)
        async with it.channel() as other:
            code, detail = await _status_at_end(other)
        # Its own deadline has another detail.
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "lasts 0.3 s here" in detail
        assert not asking.done()
        it.servicer.release.set()
        assert await asking == "answer"
