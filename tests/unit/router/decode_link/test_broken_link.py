"""A link to a worker that is gone, however gRPC names the end: its requests may continue elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import Cancelled, HeadraceError, WorkerGone
from headrace_common.process.pacing import LoopLoad
from headrace_router.decode_link.link import DecodeLink
from tests.kit.link import KeptEvents
from tests.local_channel import ScriptedCalls


class _Call(ScriptedCalls):
    """A channel with a stream of which every read fails once a request was written."""

    def __init__(self, failure: BaseException) -> None:
        self._failure = failure
        self._written = asyncio.Event()

    async def write(self, message: decode_pb2.LinkRequest) -> None:
        self._written.set()

    async def read(self) -> Any:
        await self._written.wait()
        raise self._failure


def _from_grpc(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details="Internal error from Core")


async def _failure_on(failure: BaseException) -> HeadraceError:
    channel: Any = _Call(failure)
    link, sink = DecodeLink(channel, lambda _: None, LoopLoad()), KeptEvents()
    link.open(decode_pb2.GenerateRequest(), inference_pb2.TokenIds(), Deadline.after(10), {}, sink)
    try:
        async with asyncio.timeout(5):
            await sink.read()
    except HeadraceError as error:
        return error
    raise AssertionError("the request did not fail")


@pytest.mark.parametrize(
    "failure",
    [
        _from_grpc(grpc.StatusCode.UNAVAILABLE),
        # A write failed before the stream's own status came.
        _from_grpc(grpc.StatusCode.INTERNAL),
        _from_grpc(grpc.StatusCode.CANCELLED),
        # The writer has cancelled the stream, which is not this task's end.
        asyncio.CancelledError(),
    ],
    ids=["unavailable", "internal", "cancelled", "cancelled here"],
)
async def test_a_broken_link_is_a_lost_worker(failure: BaseException) -> None:
    error = await _failure_on(failure)
    assert isinstance(error, WorkerGone)
    # The router places no other request there before the worker reports again.
    assert "grpc_code" in error.metadata


async def test_a_link_that_this_router_closes_is_none() -> None:
    channel: Any = _Call(asyncio.CancelledError())
    link, sink = DecodeLink(channel, lambda _: None, LoopLoad()), KeptEvents()
    link.open(decode_pb2.GenerateRequest(), inference_pb2.TokenIds(), Deadline.after(10), {}, sink)
    await link.close()
    with pytest.raises(Cancelled):
        await sink.read()
