"""Fetch of a prefill engine, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.kv.v1 import pair_pb2, pair_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, InternalError, StaleIncarnation
from headrace_common.rpc.status import ErrorInterceptor, error_from_rpc
from headrace_engine.vllm.standalone.fetch_service import (
    DecodeMemories,
    FetchService,
    PendingFetches,
)
from headrace_kv.layout import KvDescriptor, WorkerRef, descriptor_to_proto
from headrace_kv.messages import SendReport
from tests.component.engine.vllm.link.test_link import LAYOUT, SENT, memory
from tests.waiting import until

DESCRIPTOR = KvDescriptor(LAYOUT, (memory(0), memory(1)))
REF = WorkerRef("p", "1")


@dataclass(slots=True)
class Served:
    """A FetchService and a client of it."""

    service: FetchService
    pending: PendingFetches
    memories: DecodeMemories
    stub: pair_pb2_grpc.PairServiceAsyncStub
    stopped: list[str]

    async def start_fetch(self) -> grpc.aio.UnaryUnaryCall[Any, pair_pb2.FetchResponse]:
        """Starts a Fetch, waits until the service has received it, and matches it."""
        fetch = self.stub.Fetch(fetch_of(), timeout=5)
        await until(lambda: self.pending.match("x1") is not None)
        return fetch


@pytest.fixture
async def node() -> AsyncIterator[Served]:
    pending, memories, stopped = PendingFetches(), DecodeMemories(), list[str]()
    service = FetchService(
        ref=REF,
        rank_count=2,
        pending=pending,
        memories=memories,
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
            yield Served(service, pending, memories, stub, stopped)
    finally:
        service.close()
        await server.stop(None)


def fetch_of(end: int = 69, **changes: str) -> pair_pb2.FetchRequest:
    values: dict[str, Any] = {"transfer_id": "x1", "worker_id": "d", "incarnation": "2"}
    values |= {"handoff_endpoint": "h:1", "end_token": end, "prompt_digest": 1}
    values["descriptor"] = descriptor_to_proto(DESCRIPTOR)
    return pair_pb2.FetchRequest(**(values | changes))


def report(rank: int, reason: str = "") -> SendReport:
    return SendReport("x1", rank, reason, "why", (SENT,), 10)


async def error_of(call: Awaitable[object]) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_a_fetch_returns_when_every_rank_is_quiet(node: Served) -> None:
    fetch = await node.start_fetch()
    node.service.transfer_quiet(report(0))
    await asyncio.sleep(0.05)
    assert not fetch.done()
    node.service.transfer_quiet(report(1))
    assert (await fetch).payload_bytes == 2 * SENT.payload_bytes
    assert node.stopped == []


async def test_a_rank_that_failed_ends_the_fetch_and_stops_the_others(node: Served) -> None:
    fetch = await node.start_fetch()
    node.service.transfer_quiet(report(1, "TRANSFER_FAILED"))
    assert node.stopped == ["x1"]
    node.service.transfer_quiet(report(0, "CANCELLED"))
    assert (await error_of(fetch)).reason == "TRANSFER_FAILED"


async def test_a_fetch_that_is_cancelled_stops_the_ranks(node: Served) -> None:
    fetch = await node.start_fetch()
    fetch.cancel()
    await until(lambda: bool(node.stopped))
    assert node.pending.close_reason("x1")


async def test_a_fetch_without_a_prompt_ends_at_its_deadline(node: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.stub.Fetch(fetch_of(), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: bool(node.pending.close_reason("x1")))


async def test_a_fetch_of_no_tokens_closes_the_transfer(node: Served) -> None:
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
async def test_wrong_fetches_are_rejected(
    node: Served, request_: pair_pb2.FetchRequest, reason: str
) -> None:
    assert (await error_of(node.stub.Fetch(request_, timeout=5))).reason == reason


async def test_a_prompt_that_is_not_sent_fails_its_fetch(node: Served) -> None:
    fetch = await node.start_fetch()
    node.service.fail("x1", InternalError("gone"))
    for rank in range(2):
        node.service.transfer_quiet(report(rank, "CANCELLED"))
    assert "gone" in str(await error_of(fetch))


async def test_a_fetch_brings_the_descriptor_of_decode(node: Served) -> None:
    decode = WorkerRef("d", "2")
    with pytest.raises(StaleIncarnation):
        await node.memories.find(decode, Deadline.after(5))
    (await node.start_fetch()).cancel()
    assert await node.memories.find(decode, Deadline.after(5)) == DESCRIPTOR
    with pytest.raises(StaleIncarnation):
        await node.memories.find(WorkerRef("d", "1"), Deadline.after(5))
