"""Fetch and Describe of a prefill engine, over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from headrace.kv.v1 import pair_pb2, pair_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import InternalError, StaleIncarnation, WorkerGone
from headrace_common.rpc.status import ErrorInterceptor, error_from_rpc
from headrace_engine.vllm.standalone.fetch_service import DecodeMemories, FetchService
from headrace_engine.vllm.standalone.pending_fetches import PendingFetches
from headrace_kv.handoff.messages import LayerSent, SendReport
from headrace_kv.layout.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef
from tests.waiting import until

LAYOUT = KvLayout.attention(
    model="m:1",
    dtype="float32",
    layer_count=2,
    kv_head_count=4,
    tensor_parallel_size=2,
    block_tokens=32,
    parts={"kv": 4096},
    block_format="vllm-cpu-vec",
)
MEMORIES = tuple(RankMemory(rank, "mooncake", f"h:{rank}", 4096, 8192, ()) for rank in (0, 1))
REF = WorkerRef("p", "1")
SENT = LayerSent(1, 0, 0, 32, 8192, 2, 0, 0, 1, "mooncake/tcp", "direct", 3)


@dataclass(slots=True)
class Served:
    """A FetchService and a client of it."""

    service: FetchService
    pending: PendingFetches
    stub: pair_pb2_grpc.PairServiceAsyncStub
    endpoint: str
    stopped: list[str] = field(default_factory=list)

    async def wait_fetch(self, transfer_id: str) -> None:
        """Waits until the service has received a Fetch, and matches it."""
        await until(lambda: self.pending.match(transfer_id) is not None)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    pending, stopped = PendingFetches(), list[str]()
    service = FetchService(
        ref=REF,
        descriptor=KvDescriptor(LAYOUT, MEMORIES),
        pending=pending,
        memories=DecodeMemories(),
        stop=stopped.append,
        timeout_s=5.0,
    )
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    pair_pb2_grpc.add_PairServiceServicer_to_server(service, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            stub = pair_pb2_grpc.PairServiceStub(channel)
            yield Served(service, pending, stub, endpoint, stopped)
    finally:
        await server.stop(None)


def fetch_of(end: int = 69, **changes: str) -> pair_pb2.FetchRequest:
    request = pair_pb2.FetchRequest(
        transfer_id="x1",
        worker_id="d",
        incarnation="2",
        handoff_endpoint="h:1",
        end_token=end,
        prompt_digest=1,
    )
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def report(rank: int, reason: str = "") -> SendReport:
    return SendReport("x1", rank, reason, "why", (SENT,), 10)


async def test_a_fetch_returns_when_every_rank_is_quiet() -> None:
    async with served() as node:
        fetch = asyncio.ensure_future(node.stub.Fetch(fetch_of(), timeout=5))
        await node.wait_fetch("x1")
        node.service.transfer_quiet(report(0))
        await asyncio.sleep(0.05)
        assert not fetch.done()
        node.service.transfer_quiet(report(1))
        assert (await fetch).payload_bytes == 2 * SENT.payload_bytes
        assert node.stopped == []


async def test_a_rank_that_failed_ends_the_fetch_and_stops_the_others() -> None:
    async with served() as node:
        fetch = asyncio.ensure_future(node.stub.Fetch(fetch_of(), timeout=5))
        await node.wait_fetch("x1")
        node.service.transfer_quiet(report(1, "TRANSFER_FAILED"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fetch
        assert error_from_rpc(caught.value).reason == "TRANSFER_FAILED"
        assert node.stopped == ["x1"]


async def test_a_fetch_that_is_cancelled_stops_the_ranks() -> None:
    async with served() as node:
        fetch = node.stub.Fetch(fetch_of(), timeout=5)
        waiting = asyncio.ensure_future(fetch)
        await node.wait_fetch("x1")
        fetch.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: bool(node.stopped))
        assert node.pending.close_reason("x1")


async def test_a_fetch_without_a_prompt_ends_at_its_deadline() -> None:
    async with served() as node:
        start_s = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.stub.Fetch(fetch_of(), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - start_s < 2
        await until(lambda: bool(node.pending.close_reason("x1")))


async def test_a_fetch_of_no_tokens_closes_the_transfer() -> None:
    async with served() as node:
        assert (await node.stub.Fetch(fetch_of(end=0), timeout=5)).payload_bytes == 0
        assert node.pending.close_reason("x1") == "decode needs nothing of it"
        assert node.stopped == []


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (fetch_of(transfer_id=""), "INVALID_FIELD"),
        (fetch_of(handoff_endpoint=""), "INVALID_FIELD"),
        (fetch_of(source_incarnation="older"), "STALE_INCARNATION"),
    ],
)
async def test_wrong_fetches_are_rejected(request_: pair_pb2.FetchRequest, reason: str) -> None:
    async with served() as node:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.stub.Fetch(request_, timeout=5)
        assert error_from_rpc(caught.value).reason == reason


async def test_a_prompt_that_is_not_sent_fails_its_fetch() -> None:
    async with served() as node:
        fetch = asyncio.ensure_future(node.stub.Fetch(fetch_of(), timeout=5))
        await node.wait_fetch("x1")
        node.service.fail("x1", InternalError("gone"))
        with pytest.raises(grpc.aio.AioRpcError, match="gone"):
            await fetch


async def test_descriptors_are_fetched_once_and_only_from_the_right_incarnation() -> None:
    async with served() as node:
        memories = DecodeMemories()
        with pytest.raises(StaleIncarnation):
            await memories.find(REF, Deadline.after(5))
        memories.set_endpoint(REF, node.endpoint)
        assert await memories.find(REF, Deadline.after(5)) == KvDescriptor(LAYOUT, MEMORIES)
        older = WorkerRef("p", "0")
        memories.set_endpoint(older, node.endpoint)
        with pytest.raises(StaleIncarnation):
            await memories.find(older, Deadline.after(5))
        gone = WorkerRef("q", "0")
        memories.set_endpoint(gone, "127.0.0.1:9")
        with pytest.raises(WorkerGone):
            await memories.find(gone, Deadline.after(2))
    assert await memories.find(REF, Deadline.after(5)) == KvDescriptor(LAYOUT, MEMORIES)
