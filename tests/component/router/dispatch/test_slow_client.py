"""A client that does not read costs a bounded amount of memory, and nobody else's time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_router.request.response_stream import PENDING_TOKENS_MAX, ResponseStream
from tests.component.router.fakes import FakeDecode, Rig, finished, reserved, text_of, tokens

_PIECES = 1_200
_PIECE = "0123456789abcdef" * 8
_FLOOD = "flood"
# What a client takes in without reading; it would grow with the speed of the network.
_WINDOW = (("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0))


async def flood(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
    """To one prompt the worker says far more than any buffer takes, as fast as it is let."""
    yield reserved(request)
    for _ in range(_PIECES if bytes(request.token_ids).decode() == _FLOOD else 20):
        yield tokens(_PIECE)
    yield finished(request)


class Watched:
    """What the router has taken for the flooded client, and how much of it waited at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self.most_pending = 0
        add = ResponseStream.add_tokens

        async def observed(answer: ResponseStream, said: decode_pb2.Tokens) -> None:
            if bytes(answer._request.token_ids).decode() == _FLOOD:
                self.taken += 1
                pending = len(answer._pending.token_ids) + len(said.token_ids)
                self.most_pending = max(self.most_pending, pending)
            await add(answer, said)

        monkeypatch.setattr(ResponseStream, "add_tokens", observed)


async def _settled(value: Callable[[], int]) -> int:
    """The value once it stays as it is."""
    async with asyncio.timeout(20):
        while True:
            before = value()
            await asyncio.sleep(0.5)
            if before and value() == before:
                return before


async def test_a_client_that_does_not_read_is_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    await rig.add_decode(flood)
    async with grpc.aio.insecure_channel(rig.endpoint, options=_WINDOW) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        slow = stub.Generate(inference_pb2.GenerateRequest(text=_FLOOD), timeout=50)
        received = len((await slow.read()).token_ids)
        taken = await _settled(lambda: watched.taken)
        assert taken < _PIECES / 2
        assert watched.most_pending <= PENDING_TOKENS_MAX + len(_PIECE)
        begin_s = time.monotonic()
        answers = await asyncio.gather(*(rig.ask(f"other {n}") for n in range(4)))
        assert time.monotonic() - begin_s < 5
        assert all(text_of(answer) == _PIECE * 20 for answer in answers)
        assert watched.taken == taken, "it is still not read"
        while (response := await slow.read()) is not grpc.aio.EOF:
            received += len(response.token_ids)
        assert received == _PIECES * len(_PIECE), "nothing was lost meanwhile"
