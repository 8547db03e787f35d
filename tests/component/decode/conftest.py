"""A decode service with a scripted engine, a real receiver and real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import sampling_pb2
from headrace.kv.v1 import handoff_pb2_grpc, prefix_pb2_grpc
from headrace.worker.v1 import worker_pb2_grpc
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.limits import message_bytes_max, write_quiet_s
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_decode.admission import BlockAdmission, Capacity
from headrace_decode.attempts import Attempts
from headrace_decode.prefix_service import PrefixServicer
from headrace_decode.service import DecodeService
from headrace_engine.interface import Released
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.worker.status import StatusSignal, WorkerStatusServicer
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.service import HandoffServicer
from tests.component.decode.prefill_rank import RESERVATION, ROUTER, PrefillRank, next_event
from tests.component.decode.scripted_engine import REF, ScriptedEngine
from tests.linked_call import LinkedCall
from tests.model.virtual_time import VirtualTimers

NO_CHANGES: Any = None


@dataclass(frozen=True, slots=True)
class Served:
    """The service, its parts and its stubs."""

    engine: ScriptedEngine
    receiver: Receiver
    timers: VirtualTimers
    """Of the receiver: its leases, quarantines and deadlines."""
    service: DecodeService
    telemetry: Telemetry
    spans: InMemorySpanExporter
    channel: grpc.aio.Channel
    endpoint: str

    @property
    def decode(self) -> decode_pb2_grpc.DecodeServiceAsyncStub:
        return decode_pb2_grpc.DecodeServiceStub(self.channel)

    def generate(
        self, request: decode_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> LinkedCall:
        return LinkedCall(self.channel, request, timeout_s)

    @property
    def handoff(self) -> handoff_pb2_grpc.HandoffServiceAsyncStub:
        return handoff_pb2_grpc.HandoffServiceStub(self.channel)

    @property
    def worker(self) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    def end_quarantine(self) -> None:
        """Lets the time pass after which no write of a lost stream can land."""
        self.timers.advance_to(self.timers.time() + 1.1 * write_quiet_s())

    async def reserve(self, name: str = "x1", **changes: Any) -> LinkedCall:
        """Starts a request and reads its Reserved."""
        asked = request(name, **changes)
        if asked.remote_prefill:
            self.engine.play(replace(RESERVATION, transfer_id=name))
        call = self.generate(asked)
        assert await next_event(aiter(call)) == "reserved"
        return call


CONTEXT_TOKENS = 256


@pytest.fixture
def insecure() -> bool:
    """Whether callers have every role."""
    return True


@pytest.fixture
async def served(insecure: bool) -> AsyncIterator[Served]:
    engine = ScriptedEngine()
    spans = InMemorySpanExporter()
    telemetry = init_telemetry("decode", REF.worker_id, ServiceConfig(traces_sampler="always_on"))
    telemetry.add_exporter(spans)
    signal = StatusSignal()
    timers = VirtualTimers()
    tickets = ROUTER.tickets(REF, engine.descriptor.layout)
    receiver = Receiver(
        ref=REF,
        layout=engine.descriptor.layout,
        tickets=tickets,
        on_released=lambda transfer_id: engine.transfer_event(Released(transfer_id)),
        timers=timers,
    )
    attempts = Attempts(
        ref=REF,
        engine=engine,
        receiver=receiver,
        # A clock that stands still: what was refused stays contended, however slow the machine is.
        admission=BlockAdmission(
            Capacity(32, 16, CONTEXT_TOKENS, 2), clock=lambda: 0.0, on_admitted=signal.notify
        ),
        telemetry=telemetry,
        ticket_keys=ROUTER.known,
    )
    service = DecodeService(attempts, default_deadline_s=60)
    names = ["headrace.decode.v1.DecodeService"]
    bytes_max = message_bytes_max(CONTEXT_TOKENS)
    server = GrpcServer(ServiceConfig(insecure=insecure), names, message_bytes_max=bytes_max)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(service, server.server)
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(HandoffServicer(receiver), server.server)
    prefixes = PrefixServicer(engine, attempts, tickets, lambda ref: "")
    prefix_pb2_grpc.add_PrefixServiceServicer_to_server(prefixes, server.server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        WorkerStatusServicer(
            service.attempts.status,
            PrefixEventPublisher(REF, 16),
            signal,
            engine.reset_prefix_cache,
            server.request_drain,
            NO_CHANGES,
            ticket_keys=ROUTER.known,
        ),
        server.server,
    )
    endpoint = await server.start()
    async with open_channel(endpoint) as channel:
        yield Served(engine, receiver, timers, service, telemetry, spans, channel, endpoint)
    await server.stop(None)
    # Requests that a test left open must have read the end of their transfers.
    await service.finish_drain(Deadline.after(0.0))
    receiver.close()
    await asyncio.to_thread(telemetry.shutdown)


@pytest.fixture
async def rank(served: Served) -> AsyncIterator[PrefillRank]:
    rank = PrefillRank(served.handoff)
    yield rank
    rank.leave()


def request(name: str = "x1", /, **changes: Any) -> decode_pb2.GenerateRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "transfer_id": name,
        "incarnation": REF.incarnation,
        "token_ids": list(range(40)),
        "sampling": sampling_pb2.SamplingParams(max_tokens=8),
        "remote_prefill": True,
        "ticket_key_id": ROUTER.key_id,
    }
    return decode_pb2.GenerateRequest(**{**fields, **changes})
