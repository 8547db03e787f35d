"""A prefill rank's host is admitted before its stream gets a Welcome, by the addresses that the rank names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from headrace.kv.v1 import handoff_pb2, handoff_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.rpc.channel import open_channel
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.send.stream import (
    HandoffStream,
    SenderContext,
    StreamEvent,
    StreamLost,
    StreamReady,
)
from headrace_kv.tickets import NoTickets
from headrace_kv.transport.guard import Address, parse_networks
from tests.component.kv.harness import Arena, make_layout
from tests.in_memory_transport import InMemoryTransport
from tests.waiting import let_a_wrong_step_show, until

REF = WorkerRef("decode-0", "d" * 16)
LAYOUT = make_layout(1)


class Gate:
    """Admits when `open` is set. `inside` has the addresses that are admitted now."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting: list[frozenset[Address]] = []
        self.inside: list[frozenset[Address]] = []

    @asynccontextmanager
    async def admit(self, addresses: frozenset[Address]) -> AsyncIterator[None]:
        self.waiting.append(addresses)
        await self.open.wait()
        self.inside.append(addresses)
        try:
            yield
        finally:
            self.inside.remove(addresses)


class NamedTransport(InMemoryTransport):
    """Writes from 10.0.0.7."""

    def source_addresses(self, sessions: Collection[str]) -> frozenset[Address]:
        assert sessions
        return frozenset(network.network_address for network in parse_networks(["10.0.0.7"]))


@pytest.fixture
async def gate() -> Gate:
    return Gate()


@pytest.fixture
async def endpoint(gate: Gate) -> AsyncIterator[str]:
    receiver = Receiver(
        ref=REF, layout=LAYOUT, tickets=NoTickets(), on_released=lambda transfer_id: None
    )
    server = grpc.aio.server()
    servicer = HandoffServicer(receiver, gate.admit)
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    receiver.close()
    await server.stop(None)


async def test_a_rank_is_admitted_from_its_welcome_to_the_end_of_its_stream(
    gate: Gate, endpoint: str
) -> None:
    transport = NamedTransport()
    arena = Arena(LAYOUT, 0, transport, 4)

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        return KvDescriptor(LAYOUT, (arena.memory,))

    context = SenderContext(
        ref=WorkerRef("prefill-0", "a" * 16),
        rank=0,
        layout=LAYOUT,
        memory=arena.memory,
        transport=transport,
        descriptors=descriptors,
        event_loop=asyncio.get_running_loop(),
        on_quiet=lambda report: None,
    )
    events: list[StreamEvent] = []
    stream = HandoffStream(context, REF, endpoint, events.append)
    stream.start()
    await until(lambda: bool(gate.waiting))
    assert sorted(map(str, gate.waiting[0])) == ["10.0.0.7", "127.0.0.1"]
    await let_a_wrong_step_show()
    assert events == []
    gate.open.set()
    await until(lambda: [type(event) for event in events] == [StreamReady])
    assert gate.inside == gate.waiting
    stream.close()
    await until(lambda: not gate.inside)
    await until(lambda: [type(event) for event in events] == [StreamReady, StreamLost])
    transport.close()


async def test_a_hello_that_is_refused_admits_no_host(gate: Gate, endpoint: str) -> None:
    gate.open.set()
    hello = handoff_pb2.Hello(decode_worker_id="decode-9", decode_incarnation=REF.incarnation)
    async with open_channel(endpoint) as channel:
        call = handoff_pb2_grpc.HandoffServiceStub(channel).Handoff()
        await call.write(handoff_pb2.HandoffRequest(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    assert gate.waiting == []
