"""One decode rank of a host receives what its other ranks copy: with real senders, streams and copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    Draining,
    InternalError,
    TransferFailed,
    TransferTimeout,
)
from headrace_kv.copy_plan import Runs
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef
from headrace_kv.messages import Reservation
from headrace_kv.receive.ledger import LayerLanded, LocalLedger
from headrace_kv.receive.local_broadcast import (
    LocalBroadcast,
    LocalJob,
    LocalWrite,
    copy_in_process,
)
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.transfer import IncomingTransfer
from headrace_kv.shard_map import edges
from headrace_kv.tickets import NoTickets
from headrace_kv.transport.base import KvTransport
from tests.component.kv.harness import (
    BLOCK_TOKENS,
    BLOCKS,
    LAYERS,
    PARTS,
    TOKEN_BYTES,
    Arena,
    Rig,
    make_layout,
    running,
)
from tests.in_memory_transport import Fault, FaultKind, FaultPlan, InMemoryTransport, MemoryFabric
from tests.waiting import PATIENCE_S, let_a_wrong_step_show, until

TOKENS = 3 * BLOCK_TOKENS - 1
CACHE_BYTES = TOKENS * LAYERS * len(PARTS) * TOKEN_BYTES
"""The prompt's KV once, with one head."""


def layout_of(ranks: int, width: int = 1, heads: int = 1) -> KvLayout:
    return replace(make_layout(ranks, heads), broadcast_width=width)


def send(rig: Rig, **reservation: Any) -> IncomingTransfer:
    """Sends the whole prompt, in two chunks."""
    transfer = rig.start(TOKENS, **reservation)
    rig.push(transfer.transfer_id, BLOCKS, 0, 2 * BLOCK_TOKENS)
    rig.push(transfer.transfer_id, BLOCKS, 2 * BLOCK_TOKENS, TOKENS)
    rig.finish(transfer.transfer_id)
    return transfer


@dataclass
class Decode:
    """Decode's transports, which make the local copies. All of them have the same faults."""

    faults: FaultPlan
    quiet_after_failure_s: float = 0.0
    job_limit: int = 1024
    fabric: MemoryFabric = field(default_factory=MemoryFabric)
    ranks: list[KvTransport] = field(default_factory=list)
    writing: threading.Event = field(default_factory=threading.Event)

    def transports(self, role: str, rank: int) -> KvTransport:
        if role == "prefill":
            return InMemoryTransport(fabric=self.fabric)
        transport = InMemoryTransport(self.faults, fabric=self.fabric)
        self.ranks.append(transport)
        return transport

    def write(
        self, source: RankMemory, destination: RankMemory, runs: Runs, timeout_s: float
    ) -> object:
        self.writing.set()
        return self.ranks[source.rank].write(destination.session, runs, timeout_s)

    def broadcast(self, descriptor: KvDescriptor) -> LocalBroadcast:
        return LocalBroadcast(
            descriptor,
            self.write,
            quiet_after_failure_s=self.quiet_after_failure_s,
            job_limit=self.job_limit,
        )

    def running(self, ranks: int = 2, prefill_tp: int = 1) -> AbstractAsyncContextManager[Rig]:
        """A decode worker with all ranks on one host."""
        layouts = layout_of(prefill_tp), layout_of(ranks, ranks)
        return running(*layouts, self.transports, make_broadcast=self.broadcast)


def holding() -> tuple[Decode, threading.Event]:
    fault = Fault(FaultKind.HOLD)
    return Decode(FaultPlan(every=fault)), fault.release


@pytest.mark.parametrize(
    "prefill_tp, decode_tp, width, crossing, heads",
    [
        *((2, 4, 4, 1, 1), (2, 4, 2, 2, 1), (1, 4, 3, 2, 1), (4, 2, 2, 1, 1), (2, 4, 1, 4, 1)),
        # Two ranks share each head.
        (1, 4, 4, 2, 2),
    ],
)
async def test_one_rank_of_a_host_receives_over_the_network(
    prefill_tp: int, decode_tp: int, width: int, crossing: int, heads: int
) -> None:
    async with running(layout_of(prefill_tp, 1, heads), layout_of(decode_tp, width, heads)) as rig:
        transfer = send(rig)
        summary = await rig.received(transfer)
        assert summary.payload_bytes == crossing * CACHE_BYTES
        assert summary.local_bytes == (decode_tp - crossing) * CACHE_BYTES
        assert summary.acknowledgement_count == 2 * LAYERS * crossing
        await rig.quiet(transfer.transfer_id)
        assert not rig.released


async def test_blocks_are_not_released_while_a_local_copy_may_write() -> None:
    decode, release = holding()
    async with decode.running(4, 2) as rig:
        transfer = send(rig)
        # A job that has not started is cancelled, so wait for its first write.
        await until(lambda: transfer.landed and decode.writing.is_set())
        rig.receiver.cancel(transfer.transfer_id, "CANCELLED", "the client left")
        with pytest.raises(Cancelled, match="the client left"):
            await transfer.wait()
        await let_a_wrong_step_show()
        assert not rig.released
        assert rig.receiver.quarantined_blocks == len(BLOCKS)
        release.set()
        await until(lambda: bool(rig.released))
        # The write that was held has been made, and none after it.
        written_bytes = sum(np.count_nonzero(arena.cells) for arena in rig.destinations)
        assert 0 < written_bytes - CACHE_BYTES <= CACHE_BYTES // LAYERS
        await send(rig).wait()


async def test_a_failed_local_copy_fails_its_transfer_only() -> None:
    decode = Decode(FaultPlan({2: Fault(FaultKind.FAIL)}))
    async with decode.running() as rig:
        transfer = send(rig)
        with pytest.raises(
            TransferFailed, match=r"layer \d from decode rank [01] to rank [01] could not be copied"
        ) as failure:
            await transfer.wait()
        assert failure.value.metadata["layer"].isdigit()
        await until(lambda: rig.released_ids() == [transfer.transfer_id])
        for index in range(3):
            fine = send(rig, first_block=20 + index)
            try:
                await rig.received(fine)
            except TransferFailed:
                # Each of the two leaders fails once.
                continue
            break
        else:
            raise AssertionError("no transfer came through")


async def test_waiting_jobs_are_bounded() -> None:
    decode, release = holding()
    decode.job_limit = 1
    async with decode.running() as rig:
        first = send(rig)
        await until(decode.writing.is_set)
        second = send(rig, first_block=20)
        with pytest.raises(TransferFailed, match="too many local copies"):
            await second.wait()
        await until(lambda: rig.released_ids() == [second.transfer_id])
        release.set()
        await rig.received(first)


def lone_broadcast(
    write: LocalWrite = copy_in_process,
) -> tuple[LocalBroadcast, list[Arena], Callable[[], LocalJob]]:
    """Two ranks without a receiver, and a maker of jobs for one transfer that has landed."""
    layout = layout_of(2, 2)
    arenas = [Arena(layout, rank, InMemoryTransport(), 8) for rank in range(2)]
    broadcast = LocalBroadcast(KvDescriptor(layout, tuple(arena.memory for arena in arenas)), write)

    def make() -> LocalJob:
        reservation = Reservation("x1", (5, 2, 6), 0, TOKENS)
        ledger = LocalLedger(layout, reservation)
        for layer, found in enumerate(edges(layout_of(1), layout, reservation.transfer_id)):
            for edge in found:
                ledger.land(LayerLanded(edge, layer, 0, TOKENS, None))
        copies = ledger.take_due(1 << 30)
        return LocalJob(reservation, copies, Deadline.after(60.0), threading.Event())

    return broadcast, arenas, make


def test_a_cancelled_or_late_job_writes_nothing() -> None:
    broadcast, arenas, make = lone_broadcast()
    try:
        for arena in arenas:
            arena.cells[:] = 1 + arena.memory.rank
        cancelled = make()
        cancelled.cancelled.set()
        with pytest.raises(Cancelled):
            broadcast.submit(cancelled).result(PATIENCE_S)
        with pytest.raises(TransferTimeout, match="the deadline passed"):
            broadcast.submit(replace(make(), deadline=Deadline(0.0))).result(PATIENCE_S)
        assert [set(np.unique(arena.cells)) for arena in arenas] == [{1}, {2}]
        broadcast.submit(make()).result(PATIENCE_S)
        assert all((arena.cells == 1).any() and (arena.cells == 2).any() for arena in arenas)
    finally:
        broadcast.close()


def test_closing_ends_the_running_job_and_drops_waiting_ones() -> None:
    started, release = threading.Event(), threading.Event()

    def write(source: RankMemory, destination: RankMemory, runs: Runs, timeout_s: float) -> None:
        started.set()
        release.wait(timeout_s)

    broadcast, _, make = lone_broadcast(write)
    first = broadcast.submit(make())
    waiting = broadcast.submit(make())
    assert started.wait(PATIENCE_S)
    closing = threading.Thread(target=broadcast.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    release.set()
    closing.join(PATIENCE_S)
    assert first.done()
    assert waiting.cancelled()
    with pytest.raises(Draining):
        broadcast.submit(make())
    broadcast.close()


async def test_an_unexpected_error_fails_the_transfer() -> None:
    def write(source: RankMemory, destination: RankMemory, runs: Runs, timeout_s: float) -> None:
        raise ValueError("out of order")

    make_broadcast = partial(LocalBroadcast, write=write)
    async with running(layout_of(1), layout_of(2, 2), make_broadcast=make_broadcast) as rig:
        transfer = send(rig)
        with pytest.raises(InternalError, match="out of order"):
            await transfer.wait()
        await until(lambda: bool(rig.released))


async def test_a_broadcast_width_without_the_feature_is_rejected() -> None:
    with pytest.raises(InternalError, match="nothing copies"):
        Receiver(
            ref=WorkerRef("d", "1"),
            layout=layout_of(2, 2),
            tickets=NoTickets(),
            on_released=lambda _: None,
        )
