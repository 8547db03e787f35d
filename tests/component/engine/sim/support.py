"""Sim engines for tests, and what they should answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import grpc.aio

from headrace.kv.v1 import handoff_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import Cancelled, NotFound
from headrace_engine.config import EngineConfig
from headrace_engine.interface import (
    DecodeEnded,
    DecodeEvent,
    DecodeTokens,
    DecodeWork,
    PrefillOutcome,
    PrefillWork,
    Sampling,
)
from headrace_engine.sim.clock import SimClock
from headrace_engine.sim.engine import SimEngine
from headrace_engine.sim.faults import SimFaults
from headrace_kv.handoff.checksum import DigestMode
from headrace_kv.handoff.messages import Reservation, TransferTarget
from headrace_kv.layout.layout import KvDescriptor, KvLayout, WorkerRef
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.plan.shard_map import edges, heads_held
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.receive.state import TransferState
from headrace_kv.receive.transfer import TransferSummary
from headrace_kv.receive.verification import DigestChecks
from headrace_kv.transport.base import KvTransport, WriteResult

DECODE_REF = WorkerRef("decode-1", "0123456789abcdef")
GREEDY = Sampling(temperature=0.0, max_tokens=6)


def engine_config(role: Literal["prefill", "decode"], **changes: Any) -> EngineConfig:
    """A small engine: blocks of 8 tokens, in-memory transport."""
    values: dict[str, Any] = {
        "engine": "sim",
        "model": "sim:context=512",
        "role": role,
        "ref": WorkerRef(f"{role}-1", "0123456789abcdef"),
        "transport": "in_memory",
        "max_num_seqs": 8,
        "block_size": 8,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(**(values | changes))


async def no_descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
    """For engines that hand nothing over."""
    raise NotFound(f"{ref} is unknown")


@asynccontextmanager
async def decode_engine(
    faults: SimFaults | None = None, *, clock: SimClock | None = None, **changes: Any
) -> AsyncIterator[SimEngine]:
    """A started decode engine; when all is over it must have lost no block."""
    engine = SimEngine(
        engine_config("decode", **changes), no_descriptors, faults=faults, clock=clock
    )
    await engine.start()
    blocks = engine.free_block_count()
    try:
        yield engine
        await until(lambda: engine.free_block_count() == blocks)
        assert engine.guard_violations() == ()
        assert engine.usage().running_requests == engine.usage().waiting_requests == 0
    finally:
        await engine.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def decode_work(
    prompt: list[int],
    sampling: Sampling = GREEDY,
    *,
    transfer_id: str = "x1",
    remote_kv: bool = False,
    generated: tuple[int, ...] = (),
    awaits_first_token: bool = False,
    from_logits: bool = False,
) -> DecodeWork:
    """A decode request, local unless told otherwise."""
    return DecodeWork(
        transfer_id,
        (*prompt, *generated),
        sampling,
        remote_kv,
        generated_tokens=len(generated),
        awaits_first_token=awaits_first_token,
        from_logits=from_logits,
    )


async def answer_of(
    engine: SimEngine, work: DecodeWork
) -> tuple[tuple[int, ...], DecodeEnded, list[DecodeEvent]]:
    """Reads a request to its end: tokens, end, and all events."""
    tokens: list[int] = []
    events: list[DecodeEvent] = []
    async for event in engine.decode(work):
        events.append(event)
        if isinstance(event, DecodeTokens):
            tokens.extend(event.token_ids)
    end = events[-1]
    assert isinstance(end, DecodeEnded)
    return tuple(tokens), end, events


class Lent(KvTransport):
    """A transport that outlives the engine that uses it: ending one of Mooncake's takes a second, and so
    does a second engine of it for a rank that only sends.
    """

    def __init__(self, inner: KvTransport, *, receives: bool = True) -> None:
        self.name = inner.name
        self.quiet_after_failure_s = inner.quiet_after_failure_s
        self.entry_limit = inner.entry_limit
        self.byte_limit = inner.byte_limit
        self.pending_limit = inner.pending_limit
        self._inner = inner
        self._receives = receives

    @property
    def session(self) -> str:
        return self._inner.session if self._receives else "nobody writes here"

    def register(self, base_address: int, nbytes: int) -> None:
        self._inner.register(base_address, nbytes)

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        return self._inner.write(session, runs, timeout_s)

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        return self._inner.submit(session, runs, timeout_s)

    def route(self, session: str) -> str:
        return self._inner.route(session)

    def close(self) -> None:
        pass


def needed_bytes(decode: KvLayout, start_token: int, end_token: int) -> int:
    """What all decode ranks together need of some tokens, counted without any plan."""
    ranks = decode.tensor_parallel_size
    return sum(
        group.bytes_between(start_token, end_token, len(heads_held(rank, ranks, group.head_count)))
        for group in decode.groups
        for _ in group.layers
        for rank in range(ranks)
    )


def planned_bytes(
    prefill: KvLayout, decode: KvLayout, transfer_id: str, start_token: int, end_token: int
) -> int:
    """What the plan sends over the network of some tokens."""
    return sum(
        decode.group_of(layer).bytes_between(start_token, end_token, edge.head_count)
        for layer in range(decode.layer_count)
        for edge in edges(prefill, decode, layer, transfer_id)
    )


@dataclass(frozen=True, slots=True)
class Handed:
    """What one handed-over request did."""

    tokens: tuple[int, ...]
    end: DecodeEnded
    reservation: Reservation
    outcome: PrefillOutcome | None
    summary: TransferSummary | None


@dataclass(slots=True)
class Pair:
    """A prefill engine and a decode engine, with decode's half of the control plane around the
    latter.
    """

    prefill: SimEngine
    decode: SimEngine
    receiver: Receiver
    endpoint: str

    def target(self, reservation: Reservation, timeout_s: float = 20.0) -> TransferTarget:
        """What the router would tell the prefill worker."""
        return TransferTarget(
            transfer_id=reservation.transfer_id,
            decode=DECODE_REF,
            handoff_endpoint=self.endpoint,
            start_token=reservation.start_token,
            end_token=reservation.end_token,
            deadline_unix_s=time.time() + timeout_s,
        )

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling = GREEDY,
        transfer_id: str = "x1",
        *,
        generated: tuple[int, ...] = (),
    ) -> Handed:
        """One request, as the router and both services would run it."""
        work = decode_work(
            prompt, sampling, transfer_id=transfer_id, remote_kv=True, generated=generated
        )
        reader = self.decode.decode(work)
        try:
            return await self._generate([*prompt, *generated], reader)
        finally:
            await reader.aclose()  # type: ignore[attr-defined]

    async def _generate(self, prompt: list[int], reader: AsyncIterator[DecodeEvent]) -> Handed:
        reservation = await anext(reader)
        assert isinstance(reservation, Reservation)
        outcome = summary = None
        if reservation.start_token < reservation.end_token:
            transfer = self.receiver.reserve(reservation, Deadline.after(20.0))
            prefill = PrefillWork(tuple(prompt[:-1]), self.target(reservation))
            task = asyncio.create_task(self.prefill.prefill(prefill))
            try:
                summary = await transfer.wait()
                self.decode.arrived(reservation.transfer_id)
                outcome = await task
            finally:
                task.cancel()
                # A wait may be given up at the moment in which the transfer becomes whole.
                if transfer.entered_unix_ns(TransferState.COMPLETE):
                    self.decode.arrived(reservation.transfer_id)
                else:
                    self.receiver.cancel(
                        reservation.transfer_id, Cancelled.reason, "the request was given up"
                    )
        tokens: list[int] = []
        async for event in reader:
            if isinstance(event, DecodeTokens):
                tokens.extend(event.token_ids)
            elif isinstance(event, DecodeEnded):
                return Handed(tuple(tokens), event, reservation, outcome, summary)
        raise AssertionError("the answer has no end")


@asynccontextmanager
async def pair(
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    prefill_faults: SimFaults | None = None,
    decode_faults: SimFaults | None = None,
    prefill_transports: Callable[[], KvTransport] | None = None,
    decode_transports: Callable[[], KvTransport] | None = None,
    prefill_clock: SimClock | None = None,
    decode_clock: SimClock | None = None,
    digest: DigestMode = "on",
    **both: Any,
) -> AsyncIterator[Pair]:
    """Two started engines that can reach each other; when all is over neither has lost a block.

    Every layer is compared with its digest unless told otherwise.
    """
    decode_side = SimEngine(
        engine_config("decode", **(both | (decode or {}))),
        no_descriptors,
        faults=decode_faults,
        transports=decode_transports,
        clock=decode_clock,
    )

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        assert ref == DECODE_REF
        return decode_side.descriptor

    prefill_side = SimEngine(
        engine_config("prefill", **(both | (prefill or {}))),
        descriptors,
        faults=prefill_faults,
        transports=prefill_transports,
        clock=prefill_clock,
    )
    server = grpc.aio.server()
    checks: DigestChecks | None = None
    try:
        await decode_side.start()
        await prefill_side.start()
        checks = DigestChecks(decode_side.descriptor, digest)
        receiver = Receiver(
            ref=DECODE_REF,
            layout=decode_side.descriptor.layout,
            lease_ttl_s=4.0,
            on_released=decode_side.released,
            quarantine_s=0.1,
            broadcast=decode_side.broadcast,
            checks=checks,
        )
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(HandoffServicer(receiver), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        free = (prefill_side.free_block_count(), decode_side.free_block_count())
        yield Pair(prefill_side, decode_side, receiver, f"127.0.0.1:{port}")
        await until(
            lambda: (prefill_side.free_block_count(), decode_side.free_block_count()) == free
        )
        assert prefill_side.guard_violations() == decode_side.guard_violations() == ()
    finally:
        await prefill_side.close()
        await server.stop(0.5)
        if checks is not None:
            await asyncio.to_thread(checks.close)
        await decode_side.close()
