"""A prefill worker that fetches prefixes and a decode worker that has them: services, gRPC, tickets and engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import first_token_pb2, image_pb2, sampling_pb2
from headrace.kv.v1 import handoff_pb2_grpc, prefix_pb2_grpc
from headrace.prefill.v1 import prefill_pb2
from headrace_common.access.roles import Role
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.errors import StaleIncarnation
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_common.tickets import TicketKeys
from headrace_decode.admission import BlockAdmission, Capacity
from headrace_decode.attempts import Attempts
from headrace_decode.prefix_service import PrefixServicer
from headrace_decode.service import DecodeService
from headrace_engine.interface import Engine, Released
from headrace_engine.sim.engine import SimEngine
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.leases import Timers
from headrace_kv.prefix.fetch_rule import FetchRule
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.tickets import RouterTickets
from headrace_kv.transport.base import KvTransport
from headrace_prefill.prefix_fetch import FetchRecord, PrefixFetcher
from headrace_prefill.worker import PrefillWorker
from tests.component.engine.sim.support import engine_config, uses
from tests.linked_call import LinkedCall
from tests.router_key import RouterKey
from tests.sim_blocks import free_blocks, guard_violations
from tests.waiting import until

PREFILL = WorkerRef("prefill-1", "0123456789abcdef")
DECODE = WorkerRef("decode-1", "0123456789abcdef")
INSECURE = ServiceConfig(insecure=True)
LEASE_S = 30.0
QUARANTINE_S = 0.2
BLOCKS = 96
_ANSWER_S = 60.0
EngineT = TypeVar("EngineT", bound=Engine)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its answer, the outcome of its task, and where decode's reservation began."""

    tokens: tuple[int, ...]
    start_token: int
    done: prefill_pb2.TaskDone


@dataclass(slots=True)
class FetchingWorkers(Generic[EngineT]):
    """Both workers, and the router's key.

    `fetches` has the record of each fetch, and `ticket_refusals` the parts that prefill refused.
    """

    prefill: EngineT
    decode: EngineT
    worker: PrefillWorker
    fetcher: PrefixFetcher
    rule: FetchRule
    router: RouterKey
    prefill_receiver: Receiver
    decode_receiver: Receiver
    decode_endpoint: str
    end_streams_to_prefill: Callable[[], Awaitable[None]]
    """As the end of the decode worker does."""
    fetches: list[FetchRecord] = field(default_factory=list)
    ticket_refusals: list[str] = field(default_factory=list)
    known: list[WorkerRef] = field(default_factory=lambda: [PREFILL])
    """The registered prefill workers."""
    prefill_endpoint: str = ""
    _names: count[int] = field(default_factory=count)

    def ticket(self, transfer_id: str, **changes: Any) -> bytes:
        """The ticket that a router gives with a task."""
        layout = self.decode.descriptor.layout
        claims: dict[str, Any] = {"prefill": PREFILL, "decode": DECODE, "layout": layout}
        return self.router.ticket(transfer_id, **(claims | changes))

    @asynccontextmanager
    async def reserved(
        self, prompt: Sequence[int], token_count: int, images: Sequence[image_pb2.PromptImage] = ()
    ) -> AsyncIterator[Reserved]:
        """A request that holds its blocks on the decode worker.

        Its first token is chosen from prefill's state, which the simulated engine derives from every byte of the KV
        cache in prefill's memory: a fetched byte that is wrong makes a wrong answer.
        """
        name = f"x{next(self._names)}"
        request = decode_pb2.GenerateRequest(
            request_id="r",
            transfer_id=name,
            incarnation=DECODE.incarnation,
            token_ids=prompt,
            images=images,
            sampling=sampling_pb2.SamplingParams(max_tokens=token_count, temperature=0.0),
            remote_prefill=True,
            first_token=first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN,
            ticket_key_id=self.router.key_id,
        )
        async with open_channel(self.decode_endpoint, INSECURE) as channel:
            call = LinkedCall(channel, request, _ANSWER_S)
            try:
                first = await anext(call)
                yield Reserved(self, name, list(prompt), token_count, first.reserved, call, images)
            finally:
                call.cancel()

    async def run(
        self, prompt: Sequence[int], token_count: int, images: Sequence[image_pb2.PromptImage] = ()
    ) -> Turn:
        """Runs a request as a router does."""
        async with self.reserved(prompt, token_count, images) as request:
            done = await request.prefill()
            tokens = await request.answer()
        assert done.reason == "", done.detail
        return Turn(tokens, request.reserved.start_token, done)


class Workers(FetchingWorkers[SimEngine]):
    """With simulated engines."""

    def expected(self, prompt: Sequence[int], token_count: int) -> tuple[int, ...]:
        return self.decode.model.expected_tokens(prompt, token_count)

    async def turn(self, prompt: Sequence[int], token_count: int) -> Turn:
        """Runs a request as a router does. Its answer must be right."""
        turn = await self.run(prompt, token_count)
        assert turn.tokens == self.expected(prompt, token_count)
        return turn

    def free_blocks(self) -> tuple[int, int]:
        """Of both engines."""
        return free_blocks(self.prefill), free_blocks(self.decode)


@dataclass(slots=True)
class Reserved:
    """A request that holds its blocks on the decode worker."""

    workers: FetchingWorkers[Any]
    name: str
    prompt: list[int]
    token_count: int
    reserved: decode_pb2.Reserved
    call: LinkedCall
    images: Sequence[image_pb2.PromptImage] = ()

    def task(self, **changes: Any) -> prefill_pb2.PrefillTask:
        """The task that a router sends."""
        fields: dict[str, Any] = {
            "transfer_id": self.name,
            "request_id": "r",
            "token_ids": self.prompt,
            "images": self.images,
            "send_hidden_state": True,
            "start_token": self.reserved.start_token,
            "decode_worker_id": DECODE.worker_id,
            "decode_incarnation": DECODE.incarnation,
            "decode_endpoint": self.workers.decode_endpoint,
            "handoff_ticket": self.workers.ticket(self.name),
        }
        return prefill_pb2.PrefillTask(**(fields | changes))

    async def prefill(self, **changes: Any) -> prefill_pb2.TaskDone:
        """Runs the task on the prefill worker."""
        return await self.workers.worker.run(self.task(**changes))

    async def answer(self) -> tuple[int, ...]:
        """Reads the tokens to the end."""
        tokens: list[int] = []
        async with asyncio.timeout(_ANSWER_S):
            async for event in self.call:
                tokens += event.tokens.token_ids
        return tuple(tokens)


@asynccontextmanager
async def fetching_workers(
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    decode_transports: Callable[[], KvTransport] | None = None,
    timeout_s: float = 60.0,
    telemetry: Telemetry | None = None,
    prefill_timers: Timers | None = None,
    both_roles: bool = False,
    **both: Any,
) -> AsyncIterator[Workers]:
    """Both workers with empty caches. Their engines may have both roles. At the end, all blocks must be free and
    unharmed.
    """
    common = {"num_gpu_blocks_override": BLOCKS, **both}
    found: dict[WorkerRef, SimEngine] = {}

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        return found[ref].descriptor

    decode_side = found[DECODE] = SimEngine(
        engine_config("both" if both_roles else "decode", ref=DECODE, **(common | (decode or {}))),
        descriptors,
        transports=uses(decode_transports),
    )
    prefill_side = found[PREFILL] = SimEngine(
        engine_config(
            "both" if both_roles else "prefill", ref=PREFILL, **(common | (prefill or {}))
        ),
        descriptors,
    )
    async with AsyncExitStack() as stack:
        for engine in (decode_side, prefill_side):
            stack.push_async_callback(engine.close)
            await engine.start()
        spans = telemetry
        if spans is None:
            spans = init_telemetry("prefill", PREFILL.worker_id, ServiceConfig())
            stack.push_async_callback(asyncio.to_thread, spans.shutdown)
        workers = await serve(
            *(stack, Workers, prefill_side, decode_side, spans),
            *(FetchRule(0.0), timeout_s),
            prefill_timers=prefill_timers,
        )
        free = workers.free_blocks()
        yield workers
        await until(lambda: workers.free_blocks() == free, 20.0, lambda: str(workers.free_blocks()))
        assert guard_violations(prefill_side) == guard_violations(decode_side) == ()


WorkersT = TypeVar("WorkersT", bound=FetchingWorkers[Any])


def _release(engine: Engine, transfer_id: str) -> None:
    engine.transfer_event(Released(transfer_id))


async def serve(
    stack: AsyncExitStack,
    kind: type[WorkersT],
    prefill: Engine,
    decode: Engine,
    telemetry: Telemetry,
    rule: FetchRule,
    timeout_s: float,
    lease_s: float = LEASE_S,
    prefill_timers: Timers | None = None,
) -> WorkersT:
    """Serves both engines until `stack` ends."""
    router = RouterKey()
    refusals: list[str] = []
    records: list[FetchRecord] = []
    # A prefill worker has no keys of routers.
    layout = prefill.descriptor.layout
    tickets = RouterTickets(TicketKeys(), PREFILL, layout, refusals.append)
    receivers = {
        engine: Receiver(
            ref=ref,
            layout=engine.descriptor.layout,
            tickets=checked,
            on_released=partial(_release, engine),
            lease_ttl_s=lease_s,
            quarantine_s=QUARANTINE_S,
            timers=prefill_timers if engine is prefill else None,
            broadcast=engine.broadcast,
        )
        for engine, ref, checked in (
            (prefill, PREFILL, tickets),
            (decode, DECODE, router.tickets(DECODE, decode.descriptor.layout)),
        )
    }
    attempts = Attempts(
        ref=DECODE,
        engine=decode,
        receiver=receivers[decode],
        admission=BlockAdmission(Capacity(10 * BLOCKS, 8, decode.max_model_len, 8)),
        telemetry=telemetry,
        ticket_keys=router.known,
    )
    service = DecodeService(attempts, _ANSWER_S)
    known: list[WorkerRef] = [PREFILL]
    endpoints: dict[WorkerRef, str] = {}
    fetcher = PrefixFetcher(
        ref=PREFILL,
        engine=prefill,
        receiver=receivers[prefill],
        rule=rule,
        timeout_s=timeout_s,
        on_ended=records.append,
        open_channel=lambda endpoint: open_channel(endpoint, INSECURE),
    )

    def endpoint_of(ref: WorkerRef) -> str:
        if ref not in known:
            raise StaleIncarnation(f"{ref} is not registered")
        return endpoints[ref]

    prefixes = PrefixServicer(
        decode, service.attempts, router.tickets(DECODE, decode.descriptor.layout), endpoint_of
    )
    decode_server, prefill_server = (
        GrpcServer(INSECURE, ("headrace.kv.v1.HandoffService",)) for _ in range(2)
    )
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(service, decode_server.server)
    prefix_pb2_grpc.add_PrefixServiceServicer_to_server(prefixes, decode_server.server)
    for server, engine, sender in (
        (decode_server, decode, Role.PREFILL),
        (prefill_server, prefill, Role.DECODE),
    ):
        servicer = HandoffServicer(receivers[engine], senders=(sender,))
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(servicer, server.server)
        endpoint = await server.start()
        endpoints[DECODE if engine is decode else PREFILL] = endpoint
        stack.push_async_callback(server.stop, None)
        stack.callback(receivers[engine].close)
    stack.push_async_callback(fetcher.close)
    worker = PrefillWorker(
        ref=PREFILL,
        engine=prefill,
        telemetry=telemetry,
        slot_count=8,
        task_timeout_s=_ANSWER_S,
        prefixes=fetcher,
    )
    return kind(
        *(prefill, decode, worker, fetcher, rule, router, receivers[prefill], receivers[decode]),
        *(endpoints[DECODE], partial(prefill_server.stop, None), records, refusals, known),
        prefill_endpoint=endpoints[PREFILL],
    )
