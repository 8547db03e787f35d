"""Sim engines for tests, in pairs and alone, with the control plane around them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
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
from headrace_engine.sim.clock import ManualClock, SimClock
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
from tests.waiting import until

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
    """For engines that send nothing."""
    raise NotFound(f"{ref} is unknown")


@asynccontextmanager
async def decode_engine(
    faults: SimFaults | None = None, *, clock: SimClock | None = None, **changes: Any
) -> AsyncIterator[SimEngine]:
    """A started decode engine. At the end, all blocks must be free and unharmed."""
    config = engine_config("decode", **changes)
    engine = SimEngine(config, no_descriptors, faults=faults, clock=clock)
    await engine.start()
    blocks = engine.free_block_count()
    try:
        yield engine
        # A request that was aborted within a step keeps its blocks until the step ends.
        manual = [clock] if isinstance(clock, ManualClock) else []
        await advance_until(lambda: engine.free_block_count() == blocks, *manual)
        assert engine.guard_violations() == ()
        assert engine.usage().running_requests == engine.usage().waiting_requests == 0
    finally:
        await engine.close()


async def advance_until(
    condition: Callable[[], bool],
    *clocks: ManualClock,
    step_s: float = 1.0,
    timeout_s: float = 10.0,
) -> None:
    """Advances clocks step by step until the condition holds. Transfers go on in real time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            for clock in clocks:
                await clock.advance(step_s)
            await asyncio.sleep(0.001)


async def until_running(engine: SimEngine, count: int = 1) -> None:
    """Waits until so many requests hold blocks."""
    await until(lambda: engine.usage().running_requests == count)


def decode_work(
    prompt: Sequence[int],
    sampling: Sampling = GREEDY,
    *,
    transfer_id: str = "x1",
    remote_kv: bool = False,
    generated: tuple[int, ...] = (),
    awaits_first_token: bool = False,
    from_logits: bool = False,
) -> DecodeWork:
    """A decode request; by default a local one."""
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
    events = [event async for event in engine.decode(work)]
    end = events[-1]
    assert isinstance(end, DecodeEnded)
    return tokens_of(events), end, events


def tokens_of(events: Sequence[DecodeEvent]) -> tuple[int, ...]:
    """The tokens of all events."""
    return tuple(
        token for event in events if isinstance(event, DecodeTokens) for token in event.token_ids
    )


async def reserve(reader: AsyncIterator[DecodeEvent]) -> Reservation:
    """The first event of a request with remote KV."""
    reservation = await anext(reader)
    assert isinstance(reservation, Reservation)
    return reservation


async def close(reader: AsyncIterator[DecodeEvent]) -> None:
    """Closes a request's iterator, which aborts the request."""
    await reader.aclose()  # type: ignore[attr-defined]


class Lent(KvTransport):
    """A transport that stays open when its engine closes it, because closing one of Mooncake's takes a second.

    One that only sends hides its session, so that Mooncake makes no second engine for it.
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
        return self._inner.session if self._receives else "receives nothing"

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
    """Bytes that all decode ranks need of some tokens, counted without a copy plan."""
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
    """Bytes that the plan sends over the network for some tokens."""
    return sum(
        decode.group_of(layer).bytes_between(start_token, end_token, edge.head_count)
        for layer in range(decode.layer_count)
        for edge in edges(prefill, decode, layer, transfer_id)
    )


@dataclass(frozen=True, slots=True)
class Handed:
    """The results of one request with remote prefill."""

    tokens: tuple[int, ...]
    end: DecodeEnded
    reservation: Reservation
    outcome: PrefillOutcome | None
    summary: TransferSummary | None


@dataclass(slots=True)
class Pair:
    """A prefill engine, a decode engine, and the receiver of the decode worker."""

    prefill: SimEngine
    decode: SimEngine
    receiver: Receiver
    endpoint: str

    def target(self, reservation: Reservation, timeout_s: float = 20.0) -> TransferTarget:
        """The target that the router would send to the prefill worker."""
        return TransferTarget(
            transfer_id=reservation.transfer_id,
            decode=DECODE_REF,
            handoff_endpoint=self.endpoint,
            start_token=reservation.start_token,
            end_token=reservation.end_token,
            deadline_s=time.monotonic() + timeout_s,
        )

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling = GREEDY,
        transfer_id: str = "x1",
        *,
        generated: tuple[int, ...] = (),
    ) -> Handed:
        """Runs one request as the router and both services do."""
        work = decode_work(
            prompt, sampling, transfer_id=transfer_id, remote_kv=True, generated=generated
        )
        reader = self.decode.decode(work)
        try:
            return await self._generate([*prompt, *generated], reader)
        finally:
            await close(reader)

    async def _generate(self, prompt: list[int], reader: AsyncIterator[DecodeEvent]) -> Handed:
        reservation = await reserve(reader)
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
                # The transfer may become complete while its wait is cancelled.
                if transfer.entered_unix_ns(TransferState.COMPLETE):
                    self.decode.arrived(reservation.transfer_id)
                else:
                    self.receiver.cancel(
                        reservation.transfer_id, Cancelled.reason, "the request was cancelled"
                    )
        events = [event async for event in reader]
        end = events[-1]
        assert isinstance(end, DecodeEnded)
        return Handed(tokens_of(events), end, reservation, outcome, summary)


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
    """A prefill and a decode engine. At the end, all blocks of both must be free and unharmed.

    By default every layer is compared with its digest.
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
            features=tuple(filter(None, (decode_side.broadcast, checks))),
        )
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(HandoffServicer(receiver), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        free = (prefill_side.free_block_count(), decode_side.free_block_count())
        yield Pair(prefill_side, decode_side, receiver, f"127.0.0.1:{port}")
        manual = [
            clock for clock in (prefill_clock, decode_clock) if isinstance(clock, ManualClock)
        ]
        await advance_until(
            lambda: (prefill_side.free_block_count(), decode_side.free_block_count()) == free,
            *manual,
        )
        assert prefill_side.guard_violations() == decode_side.guard_violations() == ()
    finally:
        await prefill_side.close()
        await server.stop(0.5)
        if checks is not None:
            await asyncio.to_thread(checks.close)
        await decode_side.close()


async def cancel_at_random(
    both: Pair, clock: ManualClock, *, count: int, seed: int, ticks: int
) -> None:
    """Runs `count` requests on both engines' clock and cancels every second one within `ticks` seconds.

    The others must be answered correctly. Most of the cancelled ones must not get an answer.
    """
    chance = random.Random(seed)
    prompts = [[number % 3, *range(chance.randrange(5, 60))] for number in range(count)]
    tasks = [
        asyncio.create_task(both.generate(prompt, transfer_id=f"x{number}"))
        for number, prompt in enumerate(prompts)
    ]
    due = {number: chance.randrange(ticks) for number in range(1, count, 2)}
    cancelled: set[int] = set()
    tick = 0

    def cancel_due() -> bool:
        nonlocal tick
        for number, task in enumerate(tasks):
            if due.get(number) == tick and task.cancel():
                cancelled.add(number)
        tick += 1
        return all(task.done() for task in tasks)

    await advance_until(cancel_due, clock, timeout_s=30.0)
    for number, (prompt, task) in enumerate(zip(prompts, tasks, strict=True)):
        if number in cancelled:
            assert task.cancelled(), f"request {number} was answered after its cancellation"
        else:
            expected = both.decode.model.expected_tokens(prompt, GREEDY.max_tokens)
            assert (await task).tokens == expected
    assert len(cancelled) > count // 4
