"""Sim engines for tests, in pairs and alone, with the control plane around them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from headrace.kv.v1 import handoff_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import Cancelled, NotFound
from headrace_common.registry.adapters import Adapter
from headrace_engine.config import EngineConfig, WorkerRole
from headrace_engine.interface import (
    Arrived,
    DecodeEnded,
    DecodeEvent,
    DecodeTokens,
    DecodeWork,
    PrefillOutcome,
    PrefillWork,
    Released,
    Sampling,
)
from headrace_engine.sim.engine import SimEngine
from headrace_kv.checksum import DigestMode
from headrace_kv.layout import KvDescriptor, KvLayout, WorkerRef
from headrace_kv.messages import Reservation, SendReport, TransferTarget
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.receive.transfer import IncomingTransfer, TransferState, TransferSummary
from headrace_kv.receive.verification import DigestChecks
from headrace_kv.shard_map import edges, heads_held
from headrace_kv.tickets import NoTickets
from headrace_kv.tiers.copier import TierCopier
from headrace_kv.tiers.pool import PoolOpener
from headrace_kv.tiers.tiers import TierCopy, TierSettings
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import TransportUse
from headrace_kv.transport.memory import PAGE_BYTES, PASSED, Mark
from tests.decoding import decoded
from tests.in_memory_transport import KIND
from tests.sim_blocks import free_blocks, guard_violations
from tests.sim_clock import ManualClock
from tests.waiting import PATIENCE_S, until

LEASE_S = 30.0
"""Runs out in no test, also on a machine that stands still."""

DECODE_REF = WorkerRef("decode-1", "0123456789abcdef")
GREEDY = Sampling(temperature=0.0, max_tokens=6)
# Parts of several types, a small group and states.
EVERYTHING = (
    "sim:layers=2,heads=2,parts=k:16:int8/v:12:int8/scale:4:float32,index_layers=1,state_layers=2,"
    "state_parts=conv:6/ssm:64,context=512"
)


def engine_config(role: WorkerRole, **changes: Any) -> EngineConfig:
    """A small engine: blocks of 8 tokens, in-memory transport."""
    values: dict[str, Any] = {
        "engine": "sim",
        "model": "sim:context=512",
        "role": role,
        "ref": WorkerRef(f"{role}-1", "0123456789abcdef"),
        "transport": KIND,
        "max_num_seqs": 8,
        "block_size": 8,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(**(values | changes))


async def no_descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
    """For engines that send nothing."""
    raise NotFound(f"{ref} is unknown")


def host_blocks(count: int) -> TierSettings:
    """Main memory for so many blocks of these small models."""
    return TierSettings(host_gib=count * PAGE_BYTES / 2**30)


def hold_loads(monkeypatch: pytest.MonkeyPatch, *passing: TierCopier) -> threading.Event:
    """Loads from main memory, but for the `passing` ranks, wait from now on until the event is set."""
    go_on, copy_blocks = threading.Event(), TierCopier.copy

    def held(copier: TierCopier, copy: TierCopy, mark: Mark = PASSED) -> None:
        if copy.destination == Tier.DEVICE and copier not in passing:
            assert go_on.wait(PATIENCE_S)
        copy_blocks(copier, copy, mark)

    monkeypatch.setattr(TierCopier, "copy", held)
    return go_on


def uses(transports: Callable[[], KvTransport] | None) -> Callable[[], TransportUse] | None:
    """For an engine that is the only user of each transport."""
    return None if transports is None else lambda: TransportUse.sole(transports())


@asynccontextmanager
async def decode_engine(
    *,
    clock: ManualClock | None = None,
    pools: PoolOpener | None = None,
    **changes: Any,
) -> AsyncIterator[SimEngine]:
    """A started decode engine. At the end, all blocks must be free and unharmed."""
    config = engine_config("decode", **changes)
    engine = SimEngine(config, no_descriptors, clock=clock, pools=pools)
    await engine.start()
    blocks = free_blocks(engine)
    try:
        yield engine
        # A request that was aborted within a step keeps its blocks until the step ends.
        manual = [clock] if clock else []
        await advance_until(lambda: free_blocks(engine) == blocks, *manual)
        assert guard_violations(engine) == ()
        assert engine.usage().running_requests == engine.usage().waiting_requests == 0
    finally:
        await engine.close()


async def advance_until(
    condition: Callable[[], bool],
    *clocks: ManualClock,
    step_s: float = 1.0,
    timeout_s: float = PATIENCE_S,
) -> None:
    """Advances clocks step by step until the condition holds. Transfers go on in real time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            for clock in clocks:
                await clock.advance(step_s)
            await asyncio.sleep(0.001)


async def until_running(engine: SimEngine) -> None:
    """Waits until one request holds blocks."""
    await until(lambda: engine.usage().running_requests == 1)


def decode_work(
    prompt: Sequence[int],
    sampling: Sampling = GREEDY,
    *,
    transfer_id: str = "x1",
    remote_kv: bool = False,
    generated: tuple[int, ...] = (),
    awaits_first_token: bool = False,
    from_hidden_state: bool = False,
    cache_salt: str = "",
    adapter: Adapter | None = None,
) -> DecodeWork:
    """A decode request; by default a local one."""
    return DecodeWork(
        transfer_id,
        (*prompt, *generated),
        sampling,
        remote_kv,
        generated_tokens=len(generated),
        awaits_first_token=awaits_first_token,
        from_hidden_state=from_hidden_state,
        cache_salt=cache_salt,
        adapter=adapter,
    )


async def answer_of(
    engine: SimEngine, work: DecodeWork
) -> tuple[tuple[int, ...], DecodeEnded, list[DecodeEvent]]:
    """Reads a request to its end: tokens, end, and all events."""
    events = [event async for event in decoded(engine, work)]
    end = events[-1]
    assert isinstance(end, DecodeEnded)
    return tokens_of(events), end, events


async def check_answer(engine: SimEngine, work: DecodeWork) -> DecodeEnded:
    """Reads a request to its end, and compares its tokens with the closed form."""
    tokens, end, _ = await answer_of(engine, work)
    assert tokens == expected_tokens(engine, work)
    return end


def expected_tokens(engine: SimEngine, work: DecodeWork) -> tuple[int, ...]:
    """The tokens that a correct engine yields for the request."""
    prompt, sampling = work.token_ids[: work.prompt_tokens], work.sampling
    count = min(sampling.max_tokens, engine.max_model_len - len(prompt))
    whole = engine.model.expected_tokens(prompt, count, sampling, work.adapter)
    return whole[work.generated_tokens :]


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
        for layer, found in enumerate(edges(prefill, decode, transfer_id))
        for edge in found
    )


@dataclass(frozen=True, slots=True)
class Handed:
    """The results of one request with remote prefill."""

    tokens: tuple[int, ...]
    end: DecodeEnded
    reservation: Reservation
    outcome: PrefillOutcome | None
    summary: TransferSummary | None


@dataclass(frozen=True, slots=True)
class Started:
    """A request with remote prefill that has its reservation, and its prefill."""

    reader: AsyncIterator[DecodeEvent]
    reservation: Reservation
    transfer: IncomingTransfer
    prefill: asyncio.Task[PrefillOutcome]


@dataclass(slots=True)
class Pair:
    """A prefill engine, a decode engine, and the receiver of the decode worker."""

    prefill: SimEngine
    decode: SimEngine
    receiver: Receiver
    endpoint: str
    reports: list[SendReport] = field(default_factory=list)

    async def start(
        self,
        work: DecodeWork,
        timeout_s: float = 20.0,
        on_first_token: Callable[[DecodeTokens], None] | None = None,
    ) -> Started:
        """Starts a request and its prefill. Decode must have cached less than the prompt."""
        reader = decoded(self.decode, work)
        return self._send(work, reader, await reserve(reader), timeout_s, on_first_token)

    def _send(
        self,
        work: DecodeWork,
        reader: AsyncIterator[DecodeEvent],
        reservation: Reservation,
        timeout_s: float = 20.0,
        on_first_token: Callable[[DecodeTokens], None] | None = None,
    ) -> Started:
        transfer = self.receiver.reserve(
            reservation,
            Deadline.after(timeout_s),
            hidden_format=self.decode.hidden_format if work.from_hidden_state else None,
        )
        # As the router sends it to the prefill worker.
        target = TransferTarget(
            transfer_id=reservation.transfer_id,
            decode=DECODE_REF,
            handoff_endpoint=self.endpoint,
            start_token=reservation.start_token,
            end_token=reservation.end_token,
            deadline_s=time.monotonic() + timeout_s,
            with_hidden_state=work.from_hidden_state,
        )
        prefill = PrefillWork(
            work.token_ids[: work.transferable_tokens],
            target,
            work.sampling if on_first_token is not None else None,
            work.cache_salt,
            work.adapter,
        )
        task = asyncio.create_task(
            self.prefill.prefill(prefill, on_first_token, self.reports.append)
        )
        return Started(reader, reservation, transfer, task)

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling = GREEDY,
        transfer_id: str = "x1",
        *,
        generated: tuple[int, ...] = (),
        check: bool = True,
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> Handed:
        """Runs one request as the router and both services do. With `check`, the answer must be correct."""
        work = decode_work(
            prompt,
            sampling,
            transfer_id=transfer_id,
            remote_kv=True,
            generated=generated,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        reader = decoded(self.decode, work)
        try:
            handed = await self._generate(work, reader)
        finally:
            await close(reader)
        assert not check or handed.tokens == expected_tokens(self.decode, work)
        return handed

    async def _generate(self, work: DecodeWork, reader: AsyncIterator[DecodeEvent]) -> Handed:
        reservation = await reserve(reader)
        outcome = summary = None
        if reservation.start_token < reservation.end_token:
            started = self._send(work, reader, reservation)
            try:
                summary = await started.transfer.wait()
                self.decode.transfer_event(Arrived(reservation.transfer_id))
                outcome = await started.prefill
            finally:
                started.prefill.cancel()
                # The transfer may become complete while its wait is cancelled.
                if TransferState.COMPLETE in dict(started.transfer.states.transitions):
                    self.decode.transfer_event(Arrived(reservation.transfer_id))
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
    prefill_transports: Callable[[], KvTransport] | None = None,
    decode_transports: Callable[[], KvTransport] | None = None,
    prefill_clock: ManualClock | None = None,
    decode_clock: ManualClock | None = None,
    digest: DigestMode = "on",
    guarded: bool = True,
    **both: Any,
) -> AsyncIterator[Pair]:
    """A prefill and a decode engine. At the end, all blocks of both must be free and unharmed.

    By default every layer is compared with its digest. Blocks that are not `guarded` are not looked at.
    """
    decode_side = SimEngine(
        engine_config("decode", **(both | (decode or {}))),
        no_descriptors,
        transports=uses(decode_transports),
        clock=decode_clock,
    )

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        assert ref == DECODE_REF
        return decode_side.descriptor

    prefill_side = SimEngine(
        engine_config("prefill", **(both | (prefill or {}))),
        descriptors,
        transports=uses(prefill_transports),
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
            tickets=NoTickets(),
            lease_ttl_s=LEASE_S,
            on_released=lambda transfer_id: decode_side.transfer_event(Released(transfer_id)),
            quarantine_s=0.1,
            broadcast=decode_side.broadcast,
            checks=checks,
        )
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(HandoffServicer(receiver), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        free = (free_blocks(prefill_side), free_blocks(decode_side))
        yield Pair(prefill_side, decode_side, receiver, f"127.0.0.1:{port}")
        manual = [clock for clock in (prefill_clock, decode_clock) if clock]
        await advance_until(
            lambda: (free_blocks(prefill_side), free_blocks(decode_side)) == free,
            *manual,
        )
        if guarded:
            assert guard_violations(prefill_side) == guard_violations(decode_side) == ()
    finally:
        await prefill_side.close()
        await server.stop(0.5)
        if checks is not None:
            await asyncio.to_thread(checks.close)
        await decode_side.close()
