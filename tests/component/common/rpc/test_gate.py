"""A gate rejects an RPC by its metadata before its request arrives, and by its bytes before they are parsed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.client_config import ClientFacingConfig
from headrace_common.errors import HeadraceError, InvalidRequest, QueueFull, Unauthenticated
from headrace_common.rpc.channel import MESSAGE_BYTES_MAX, open_channel
from headrace_common.rpc.handlers import GateInterceptor, Metadata
from headrace_common.rpc.server import ClientServices, GrpcServer
from headrace_common.rpc.status import error_from_rpc

_KEY = (("x-api-key", "right"),)
_BYTES_MAX = 1024 * 1024


class _Gate(GateInterceptor):
    def __init__(self) -> None:
        super().__init__()
        self.received_bytes: list[int] = []

    def check_call(self, method: str, metadata: Metadata) -> None:
        if ("x-api-key", "right") not in [(name, value) for name, value in metadata]:
            raise Unauthenticated(f"no key for {method}")

    def check_request(self, method: str, data: bytes) -> None:
        self.received_bytes.append(len(data))
        if len(data) > 1_000:
            raise InvalidRequest({"request": "too long"})


class _Servicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.calls = 0

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.calls += 1
        yield inference_pb2.GenerateResponse(text=request.text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        self.calls += 1
        return inference_pb2.ListModelsResponse()


@asynccontextmanager
async def _served() -> AsyncIterator[tuple[_Gate, _Servicer, Any, Any]]:
    gate, servicer = _Gate(), _Servicer()  # type: ignore[abstract]
    clients = ClientServices((), [gate], _BYTES_MAX)
    server = GrpcServer(ClientFacingConfig(), (), clients)
    assert server.client_server is not None
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.client_server)
    await server.start()
    path = "/headrace.inference.v1.InferenceService/"
    try:
        async with open_channel(server.client_endpoint) as channel:
            yield (
                gate,
                servicer,
                channel.unary_stream(f"{path}Generate"),
                channel.unary_unary(f"{path}ListModels"),
            )
    finally:
        await server.stop(0)


async def _finish(call: Any) -> None:
    if isinstance(call, grpc.aio.UnaryStreamCall):
        async for _ in call:
            pass
    else:
        await call


async def _error_of(call: Any) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _finish(call)
    return error_from_rpc(caught.value)


async def test_a_call_without_the_key_is_rejected_before_its_request_arrives() -> None:
    async with _served() as (gate, servicer, generate, list_models):
        body = bytes(MESSAGE_BYTES_MAX - 1_000)
        for call in (generate(body, timeout=20), list_models(body, timeout=20)):
            error = await _error_of(call)
            assert isinstance(error, Unauthenticated)
            assert "no key for /headrace.inference.v1" in error.detail
        assert not gate.received_bytes
        assert not servicer.calls


async def test_a_request_is_rejected_before_it_is_parsed() -> None:
    async with _served() as (gate, servicer, generate, list_models):
        # Protobuf cannot parse it either, and would name another reason.
        body = b"\xff" * 2_000
        for call in (
            generate(body, metadata=_KEY, timeout=20),
            list_models(body, metadata=_KEY, timeout=20),
        ):
            error = await _error_of(call)
            assert isinstance(error, InvalidRequest)
            assert error.violations == {"request": "too long"}
        assert gate.received_bytes == [2_000, 2_000]
        assert not servicer.calls


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_message_is_bounded_by_its_size_after_decompression(
    compression: grpc.Compression,
) -> None:
    async with _served() as (gate, servicer, generate, list_models):
        options: dict[str, Any] = {"metadata": _KEY, "timeout": 20, "compression": compression}
        body = inference_pb2.GenerateRequest(text="x" * 900).SerializeToString()
        await _finish(generate(body, **options))
        # Some 60 KB on the wire, and a message of twice the bound.
        bomb, twice = bytes(60 * 1024 * 1024), bytes(2 * _BYTES_MAX)
        for call in (
            *(generate(bomb, **options), list_models(bomb, **options)),
            *(generate(twice, **options), list_models(twice, metadata=_KEY, timeout=20)),
        ):
            error = await _error_of(call)
            assert isinstance(error, QueueFull)
            assert "larger than max" in error.detail
        assert gate.received_bytes == [len(body)]
        assert servicer.calls == 1
