"""A client that does not read costs bounded memory, and does not delay other clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_frontend.request.response_stream import PENDING_TOKENS_MAX, ResponseStream
from headrace_frontend.running import runner
from headrace_router.decode_link.link import WINDOW_TOKENS
from tests.kit.router import Rig, text_of, with_settings
from tests.kit.workers import FakeDecode, finished, reserved, tokens
from tests.waiting import let_a_wrong_step_show, until

_PIECES = 1_200
_PIECE = "0123456789abcdef" * 8
_FLOOD = "flood"
# Bytes that a client receives without reading. By default, they grow with the speed of the network.
_WINDOW = (("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0))


async def flood(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
    """Sends far more than any buffer holds for one prompt, as fast as the router reads."""
    yield reserved(request)
    for _ in range(_PIECES if bytes(request.token_ids).decode() == _FLOOD else 20):
        yield tokens(_PIECE)
    yield finished(request)


class Watched:
    """Counts the batches that the router has read for the slow client, and the largest number of pending tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches = 0
        self.most_pending = 0
        add = ResponseStream.add_tokens

        def observed(response: ResponseStream, token_ids: Sequence[int], *more: Any) -> bool:
            if bytes(response.request.token_ids.tolist()).decode() == _FLOOD:
                self.batches += 1
                pending = len(response._generated) - response._sent + len(token_ids)
                self.most_pending = max(self.most_pending, pending)
            return add(response, token_ids, *more)

        monkeypatch.setattr(ResponseStream, "add_tokens", observed)


async def _settled(value: Callable[[], int]) -> int:
    """The value after it has not changed in many rounds, of which a machine that stands still delays a few."""
    async with asyncio.timeout(60):
        while True:
            before = value()
            for _ in range(10):
                await let_a_wrong_step_show()
            if before and value() == before:
                return before


async def test_a_client_that_does_not_read_blocks_only_its_own_decode_stream(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    await rig.add_decode(flood)
    async with grpc.aio.insecure_channel(rig.endpoint, options=_WINDOW) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        slow = stub.Generate(inference_pb2.GenerateRequest(text=_FLOOD), timeout=120)
        received = len((await slow.read()).token_ids)
        batches = await _settled(lambda: watched.batches)
        assert batches < _PIECES / 2
        assert watched.most_pending <= PENDING_TOKENS_MAX + WINDOW_TOKENS
        responses = await asyncio.gather(*(rig.ask(f"other {n}") for n in range(4)))
        assert all(text_of(response) == _PIECE * 20 for response in responses)
        assert watched.batches == batches, "the slow client is still not read from"
        while (response := await slow.read()) is not grpc.aio.EOF:
            received += len(response.token_ids)
        assert received == _PIECES * len(_PIECE), "no token was lost"


@with_settings(default_deadline_s=1.0)
async def test_a_client_that_does_not_read_loses_its_slot_after_its_deadline(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "READ_GRACE_S", 0.5)
    watched = Watched(monkeypatch)
    await rig.add_decode(flood)
    async with grpc.aio.insecure_channel(rig.endpoint, options=_WINDOW) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        slow = stub.Generate(inference_pb2.GenerateRequest(text=_FLOOD))
        await slow.read()
        assert rig.router.runner.requests == 1
        await until(lambda: rig.router.runner.requests == 0, what="the end of the request")
        assert watched.batches < _PIECES
        slow.cancel()
