"""Sim engines that publish their prefix caches over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc.aio

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.config import ServiceConfig
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_engine.interface import Sampling
from headrace_engine.sim.engine import SimEngine
from headrace_engine.worker.status import StatusSignal, WorkerStatusServicer
from headrace_kv.layout import WorkerRef, layout_to_proto
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.workers.directory import worker_from_member
from headrace_router.workers.table import LoadTable
from tests.component.engine.sim.support import answer_of, decode_work, engine_config, no_descriptors
from tests.waiting import until

KEY = 0x5EC2_E700_0000_0001
MODEL = "small"
BLOCK_TOKENS = 8

Relay = Callable[
    [AsyncIterator[worker_pb2.SubscribeKvEventsResponse]],
    AsyncIterator[worker_pb2.SubscribeKvEventsResponse],
]


class Servicer(WorkerStatusServicer):
    """The worker's servicer, with a `relay` that may drop messages."""

    def __init__(self, engine: SimEngine) -> None:
        unused: Any = None
        events, reset = engine.prefix_events, engine.reset_prefix_cache
        super().__init__(self.status, events, StatusSignal(), reset, unused, unused)
        self.engine = engine
        self.requests: list[worker_pb2.SubscribeKvEventsRequest] = []
        self.relay: Relay | None = None
        self.has_events = True

    def status(self) -> worker_pb2.WatchStatusResponse:
        ref = self.engine.prefix_events.ref
        return worker_pb2.WatchStatusResponse(
            worker_id=ref.worker_id,
            incarnation=ref.incarnation,
            used_blocks=self.engine.usage().used_blocks,
        )

    async def SubscribeKvEvents(
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.SubscribeKvEventsResponse]:
        self.requests.append(request)
        if not self.has_events:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker has no KV events")
        messages = super().SubscribeKvEvents(request, context)
        async for message in self.relay(messages) if self.relay else messages:
            yield message


@dataclass
class CachingWorker:
    """One incarnation of a worker. Its server can be stopped and restarted on the same port."""

    ref: WorkerRef
    engine: SimEngine
    servicer: Servicer
    role: registry_pb2.Member.Role.ValueType = registry_pb2.Member.ROLE_DECODE
    endpoint: str = "127.0.0.1:0"
    server: GrpcServer | None = None
    prompt_count: int = 0

    @classmethod
    async def start(cls, worker_id: str, generation: int = 1, **changes: Any) -> CachingWorker:
        ref = WorkerRef(worker_id, f"{generation:016x}")
        settings: dict[str, Any] = {"ref": ref, "block_size": BLOCK_TOKENS} | changes
        pools = settings.pop("pools", None)
        engine = SimEngine(engine_config("decode", **settings), no_descriptors, pools=pools)
        await engine.start()
        return await cls.serving(engine, ref)

    @classmethod
    async def serving(
        cls,
        engine: SimEngine,
        ref: WorkerRef,
        role: registry_pb2.Member.Role.ValueType = registry_pb2.Member.ROLE_DECODE,
    ) -> CachingWorker:
        engine.prefix_events.set_hash_key(KEY, MODEL)
        worker = cls(ref, engine, Servicer(engine), role)
        await worker.serve()
        return worker

    async def serve(self) -> None:
        self.server = GrpcServer(ServiceConfig(internal_listen=self.endpoint, insecure=True), ())
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self.server.server)
        self.endpoint = await self.server.start()

    async def cut(self) -> None:
        """Breaks every connection and stops listening."""
        assert self.server is not None
        await self.server.server.stop(0)

    async def close(self) -> None:
        await self.cut()
        await self.engine.close()

    def member(self) -> registry_pb2.Member:
        return registry_pb2.Member(
            worker_id=self.ref.worker_id,
            incarnation=self.ref.incarnation,
            role=self.role,
            endpoint=self.endpoint,
            model=MODEL,
            max_model_len=512,
            layout=layout_to_proto(self.engine.descriptor.layout),
            max_num_seqs=8,
            start_unix_ns=int(self.ref.incarnation, 16),
        )

    async def answer(
        self, prompt: list[int], max_tokens: int = 1, cache_salt: str = ""
    ) -> tuple[list[int], int]:
        """The prompt with its answer, and how many tokens of it the engine had cached."""
        self.prompt_count += 1
        work = decode_work(
            prompt,
            Sampling(temperature=0.0, max_tokens=max_tokens),
            transfer_id=f"x{self.prompt_count}",
            cache_salt=cache_salt,
        )
        tokens, end, _ = await answer_of(self.engine, work)
        return [*prompt, *tokens], end.cached_tokens


@dataclass
class EventRig:
    """Workers, and the indexes of a router that subscribes to them."""

    key: int = KEY
    compute_s_per_token: float = 0.0
    workers: list[CachingWorker] = field(default_factory=list)
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.indexes = PrefixCacheDirectory(
            self._open_channel,
            lambda: self.key,
            compute_s_per_token=lambda model: self.compute_s_per_token,
            event_timeout_s=60.0,
        )

    def _open_channel(self, endpoint: str) -> grpc.aio.Channel:
        self.channels.append(open_channel(endpoint))
        return self.channels[-1]

    async def add(self, worker_id: str, generation: int = 1, **changes: Any) -> CachingWorker:
        worker = await CachingWorker.start(worker_id, generation, **changes)
        self.workers.append(worker)
        return worker

    async def add_cached(self, prompt: list[int]) -> tuple[CachingWorker, LoadTable]:
        """A worker that the router alone follows, and credits with the prompt's whole blocks."""
        worker = await self.add("w-0")
        table = self.follow([worker])
        await worker.answer(prompt)
        await self.until_cached(table, prompt, w_0=whole_blocks(prompt))
        return worker, table

    def follow(self, workers: Iterable[CachingWorker] | None = None) -> LoadTable:
        """Updates the router with these workers, or with all."""
        members = [worker.member() for worker in (self.workers if workers is None else workers)]
        self.indexes.update(members)
        return LoadTable(map(worker_from_member, members))

    async def close(self) -> None:
        await self.indexes.close()
        for worker in self.workers:
            await worker.close()

    def cached(self, table: LoadTable, prompt: list[int], cache_salt: str = "") -> dict[str, int]:
        """Credited tokens by worker id."""
        found = self.indexes.cached.cached_tokens(table, prompt, cache_salt).tolist()
        refs = [worker.ref.worker_id for worker in table.workers]
        return dict(zip(refs, map(int, found), strict=True))

    async def until_cached(
        self, table: LoadTable, prompt: list[int], timeout_s: float = 10.0, **tokens: int
    ) -> None:
        """Waits until the named workers have that credit for the prompt."""
        expected = {name.replace("_", "-"): count for name, count in tokens.items()}
        await until(lambda: expected.items() <= self.cached(table, prompt).items(), timeout_s)


def whole_blocks(prompt: list[int]) -> int:
    """Tokens in the prompt's whole blocks."""
    return len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS


def random_prompt(random: Random, count: int) -> list[int]:
    return [random.randrange(30_000) for _ in range(count)]
