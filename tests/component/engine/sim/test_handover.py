"""A prefill engine sends to a decode engine, over real handoff streams and a real transport."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace_common.errors import (
    Draining,
    HeadraceError,
    InternalError,
    KvCorrupt,
    TransferTimeout,
)
from headrace_kv.receive.observer import TransferState
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.in_memory import Fault, FaultKind, FaultPlan, InMemoryTransport
from tests.component.engine.sim.faults import fail_chunk
from tests.component.engine.sim.support import (
    EVERYTHING,
    Pair,
    Started,
    advance_until,
    close,
    decode_work,
    pair,
)
from tests.sim_clock import ManualClock
from tests.waiting import until

PROMPT = list(range(100, 150))
LAYERS = 3
TOKEN_BYTES = 16
MODEL = f"sim:layers={LAYERS},context=512"
# A chunk of 16 tokens takes 16 s, on a clock that the test advances.
SLOW = f"{MODEL},prefill_s_per_token=1"
CHUNK_S = 16.0


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


async def test_a_dropped_write_is_an_error_with_digests() -> None:
    async with pair(prefill_transports=faulty(Fault(FaultKind.DROP), 2)) as both:
        with pytest.raises(KvCorrupt, match="layer 1 from rank 0 to rank 0"):
            await both.generate(PROMPT)


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
