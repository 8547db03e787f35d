"""A prefill engine sends to a decode engine, over real handoff streams and a real transport."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from headrace_common.errors import (
    Cancelled,
    Draining,
    HeadraceError,
    InternalError,
    KvCorrupt,
    TransferFailed,
    TransferTimeout,
)
from headrace_kv.handoff.messages import LayerSent
from headrace_kv.plan.shard_map import expected_keys
from headrace_kv.receive.observer import TransferState
from headrace_kv.receive.transfer import IncomingTransfer
from headrace_kv.transport.base import KvTransport
from tests.component.engine.sim.faults import fail_chunk
from tests.component.engine.sim.support import (
    EVERYTHING,
    Handed,
    Pair,
    Started,
    advance_until,
    close,
    decode_work,
    pair,
    planned_bytes,
    until_running,
)
from tests.in_memory_transport import Fault, FaultKind, FaultPlan, InMemoryTransport
from tests.sim_clock import ManualClock
from tests.waiting import until

PROMPT = list(range(100, 150))
LAYERS = 3
TOKEN_BYTES = 16
RANKS = [1, 2, 4]
MODEL = f"sim:layers={LAYERS},context=512"
# A chunk of 16 tokens takes 16 s, on a clock that the test advances.
SLOW = f"{MODEL},prefill_s_per_token=1"
CHUNK_S = 16.0


def sent_layers(handed: Handed) -> list[LayerSent]:
    assert handed.outcome is not None
    return [sent for _, sent in handed.outcome.layers]


async def check_pairing(heads: int, prefill_tp: int, decode_tp: int, **both_sides: Any) -> None:
    async with pair(
        prefill={"tensor_parallel_size": prefill_tp},
        decode={"tensor_parallel_size": decode_tp},
        model=f"sim:layers={LAYERS},heads={heads},context=512",
        max_num_batched_tokens=16,
        **both_sides,
    ) as both:
        handed = await both.generate(PROMPT)
        layouts = (both.prefill.descriptor.layout, both.decode.descriptor.layout)
        keys = expected_keys(*layouts, "x1")
        # 49 tokens in chunks of 16.
        assert len(sent_layers(handed)) == 4 * len(keys)
        assert handed.summary is not None
        assert handed.summary.acknowledgement_count == 4 * len(keys)
        assert handed.summary.payload_bytes == planned_bytes(*layouts, "x1", 0, 49)
        moved_bytes = handed.summary.payload_bytes + handed.summary.local_bytes
        copies = max(1, decode_tp // heads)
        assert moved_bytes == 49 * LAYERS * heads * copies * TOKEN_BYTES


@pytest.mark.parametrize("local_broadcast", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("prefill_tp", RANKS)
@pytest.mark.parametrize("decode_tp", RANKS)
async def test_every_pairing_of_ranks_in_memory(
    heads: int, prefill_tp: int, decode_tp: int, local_broadcast: bool
) -> None:
    await check_pairing(heads, prefill_tp, decode_tp, local_broadcast=local_broadcast)


async def test_an_engine_opens_and_ends_mooncake_itself() -> None:
    await check_pairing(2, 1, 1, transport="mooncake")


def has_received(transfer: IncomingTransfer, payload_bytes: int) -> bool:
    return transfer.ledger is not None and transfer.ledger.payload_bytes == payload_bytes


async def test_a_layer_is_sent_before_the_next_one_is_computed() -> None:
    clock = ManualClock()
    async with pair(model=SLOW, max_num_batched_tokens=16, prefill_clock=clock) as both:
        started = await both.start(decode_work(PROMPT, remote_kv=True))
        await until(lambda: started.transfer.state is not TransferState.RESERVED)
        layer_bytes = 16 * 2 * TOKEN_BYTES
        for layer in range(LAYERS):
            await clock.advance(CHUNK_S / LAYERS)
            await until(partial(has_received, started.transfer, (layer + 1) * layer_bytes))
        assert started.transfer.state is TransferState.RECEIVING
        assert not started.prefill.done()
        await advance_until(started.prefill.done, clock)
        await asyncio.gather(started.prefill, started.transfer.wait())
        both.decode.arrived("x1")
        await close(started.reader)


async def test_only_missing_blocks_are_transferred_for_a_shared_prefix() -> None:
    async with pair(model=MODEL) as both:
        first = await both.generate(PROMPT)
        second = await both.generate([*PROMPT[:30], *range(500, 520)], transfer_id="x2")
        assert (second.reservation.start_token, second.end.cached_tokens) == (24, 24)
        assert second.outcome is not None
        assert second.outcome.cached_tokens == 24
        assert first.summary is not None
        assert second.summary is not None
        # 49 tokens against those from 24 on.
        assert second.summary.payload_bytes * 49 == first.summary.payload_bytes * 25


@pytest.mark.parametrize("length, cached", [(50, 48), (41, 40)])
async def test_what_prefill_has_cached_is_sent_without_computing_it(
    length: int, cached: int
) -> None:
    async with pair(model=MODEL, decode={"num_gpu_blocks_override": 7}) as both:
        prompt = PROMPT[:length]
        await both.generate(prompt)
        await both.generate(list(range(50)), transfer_id="x2")
        if cached == length - 1:
            fail_chunk(both.prefill, 0)
        again = await both.generate(prompt, transfer_id="x3")
        assert (again.reservation.start_token, again.end.cached_tokens) == (0, 0)
        assert again.outcome is not None
        assert again.outcome.cached_tokens == cached


async def test_many_requests_at_once() -> None:
    async with pair(
        prefill={"tensor_parallel_size": 2},
        decode={"tensor_parallel_size": 4, "local_broadcast": True},
        num_gpu_blocks_override=40,
        max_num_batched_tokens=32,
        max_num_seqs=4,
    ) as both:
        await asyncio.gather(
            *(
                both.generate([number, *range(20 + 3 * number)], transfer_id=f"x{number}")
                for number in range(12)
            )
        )


@asynccontextmanager
async def failing_prefill(
    error: type[BaseException], match: str | None = None, timeout_s: float = 20.0, **settings: Any
) -> AsyncIterator[tuple[Pair, Started, ManualClock]]:
    """A pair with an open transfer, on a clock that the test advances. The prefill and the transfer must fail."""
    clock = ManualClock()
    values: dict[str, Any] = {"model": SLOW, "max_num_batched_tokens": 16, "prefill_clock": clock}
    async with pair(**(values | settings)) as both:
        started = await both.start(decode_work(PROMPT, remote_kv=True), timeout_s)
        await until(lambda: started.transfer.state is not TransferState.RESERVED)
        yield both, started, clock
        with pytest.raises(error, match=match):
            await started.prefill
        with pytest.raises(HeadraceError):
            await started.transfer.wait()
        await close(started.reader)


@pytest.mark.parametrize("computed_s", [0.0, 1.0, CHUNK_S + 1, 2.5 * CHUNK_S])
async def test_a_cancelled_prefill_quiesces_and_frees_its_blocks(computed_s: float) -> None:
    ranks = {"tensor_parallel_size": 2}
    async with failing_prefill(asyncio.CancelledError, prefill=ranks) as (both, started, clock):
        await until_running(both.prefill)
        await clock.advance(computed_s)
        started.prefill.cancel()
        await asyncio.wait([started.prefill])
        assert all(not sender.active_transfers() for sender in both.prefill._senders)
        both.receiver.cancel("x1", Cancelled.reason, "the prefill was cancelled")


async def test_decode_can_cancel_a_prefill() -> None:
    async with failing_prefill(Cancelled) as (both, _, clock):
        await clock.advance(CHUNK_S)
        both.receiver.cancel("x1", Cancelled.reason, "the client left")


async def test_a_failing_chunk_fails_both_sides() -> None:
    async with failing_prefill(InternalError, "chunk 1") as (both, _, clock):
        fail_chunk(both.prefill, 1)
        await clock.advance(CHUNK_S)


async def test_a_deadline_ends_a_prefill() -> None:
    # Computing never ends while the clock stands still.
    async with failing_prefill(TransferTimeout, timeout_s=0.3):
        pass


async def test_closing_the_engine_ends_a_prefill() -> None:
    async with failing_prefill(Draining) as (both, _, clock):
        await clock.advance(1.0)
        await both.prefill.close()


def faulty(fault: Fault, number: int) -> Callable[[], KvTransport]:
    return lambda: InMemoryTransport(FaultPlan(by_write={number: fault}))


async def test_a_failing_write_fails_both_sides() -> None:
    transports = faulty(Fault(FaultKind.FAIL), 2)
    async with failing_prefill(
        TransferFailed, model=MODEL, prefill_transports=transports, prefill_clock=None
    ) as (both, started, _):
        await asyncio.wait([started.prefill])
        await both.generate(PROMPT, transfer_id="x2")


async def test_a_dropped_write_is_an_error_with_digests() -> None:
    async with pair(prefill_transports=faulty(Fault(FaultKind.DROP), 2)) as both:
        with pytest.raises(KvCorrupt, match="layer 1 from rank 0 to rank 0"):
            await both.generate(PROMPT)


async def test_a_prefix_that_only_decode_has_is_computed_but_not_sent() -> None:
    async with pair(prefill={"num_gpu_blocks_override": 7}, max_num_batched_tokens=16) as both:
        await both.generate(PROMPT)
        await both.generate(list(range(50)), transfer_id="x2")
        handed = await both.generate([*PROMPT[:30], *range(500, 520)], transfer_id="x3")
        assert handed.reservation.start_token == 24
        assert handed.outcome is not None
        assert handed.outcome.cached_tokens < 24
        assert min(sent.start_token for sent in sent_layers(handed)) == 24


@pytest.mark.parametrize("model", [f"sim:layers={LAYERS},context=512", EVERYTHING])
@pytest.mark.parametrize("seed", range(3))
async def test_random_cancellations_leak_no_block_and_affect_no_other_request(
    model: str, seed: int
) -> None:
    """Every second of 40 requests is cancelled within 40 s. Most of those must not get an answer."""
    chance, clock = random.Random(seed), ManualClock()
    cancelled: set[int] = set()
    ticks = iter(range(10_000))
    async with pair(
        model=f"{model},prefill_s_per_token=0.1,decode_step_s=1",
        prefill={"tensor_parallel_size": 2, "num_gpu_blocks_override": 30},
        decode={"num_gpu_blocks_override": 40},
        max_num_batched_tokens=16,
        max_num_seqs=6,
        prefill_clock=clock,
        decode_clock=clock,
    ) as both:
        tasks = [
            asyncio.create_task(
                both.generate(
                    [number % 3, *range(chance.randrange(5, 60))], transfer_id=f"x{number}"
                )
            )
            for number in range(40)
        ]
        due = {number: chance.randrange(40) for number in range(1, 40, 2)}

        def cancel_due() -> bool:
            tick = next(ticks)
            for number, task in enumerate(tasks):
                if due.get(number) == tick and task.cancel():
                    cancelled.add(number)
            return all(task.done() for task in tasks)

        await advance_until(cancel_due, clock, timeout_s=30.0)
        for number, task in enumerate(tasks):
            if number in cancelled:
                assert task.cancelled(), f"request {number} was answered after its cancellation"
            else:
                await task
        assert len(cancelled) > 10
