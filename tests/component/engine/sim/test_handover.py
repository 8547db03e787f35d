"""A prefill engine sends to a decode engine, over real handoff streams and a real transport."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from headrace_common.errors import (
    Cancelled,
    Draining,
    HeadraceError,
    InternalError,
    TransferTimeout,
)
from headrace_engine.interface import Arrived
from headrace_engine.sim.engine import SimEngine
from headrace_engine.sim.stepper import Chunk
from headrace_kv.receive.transfer import IncomingTransfer, TransferState
from tests.component.engine.sim.support import (
    EVERYTHING,
    Pair,
    Started,
    advance_until,
    close,
    decode_work,
    pair,
    until_running,
)
from tests.sent_layers import sent_layers
from tests.sim_clock import ManualClock
from tests.waiting import until

PROMPT = list(range(100, 150))
LAYERS = 3
TOKEN_BYTES = 16
MODEL = f"sim:layers={LAYERS},context=512"
# A chunk of 16 tokens takes 16 s, on a clock that the test advances.
SLOW = f"{MODEL},prefill_s_per_token=1"
CHUNK_S = 16.0


def fail_chunk(engine: SimEngine, start_token: int) -> None:
    """Makes every step fail that computes a prompt from that token on."""
    stepper = engine._stepper
    compute = stepper.compute

    async def fail_or_compute(chunks: Sequence[Chunk], *, sends: bool) -> None:
        if any(not one.is_decode and one.start == start_token for one in chunks):
            raise InternalError(f"the chunk at {start_token} fails: a fault was injected")
        await compute(chunks, sends=sends)

    vars(stepper)["compute"] = fail_or_compute


async def test_an_engine_opens_and_ends_mooncake_itself() -> None:
    async with pair(model=MODEL, transport="mooncake", max_num_batched_tokens=16) as both:
        await both.generate(PROMPT)


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
        both.decode.transfer_event(Arrived("x1"))
        await close(started.reader)


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
            fail_chunk(both.prefill, cached)
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
    async with failing_prefill(InternalError, "the chunk at 16") as (both, _, clock):
        fail_chunk(both.prefill, 16)
        await clock.advance(CHUNK_S)


async def test_a_deadline_ends_a_prefill() -> None:
    # Computing never ends while the clock stands still.
    async with failing_prefill(TransferTimeout, timeout_s=0.3):
        pass


async def test_closing_the_engine_ends_a_prefill() -> None:
    async with failing_prefill(Draining) as (both, _, clock):
        await clock.advance(1.0)
        await both.prefill.close()


async def test_a_prefix_that_only_decode_has_is_computed_but_not_sent() -> None:
    async with pair(prefill={"num_gpu_blocks_override": 7}, max_num_batched_tokens=16) as both:
        await both.generate(PROMPT)
        await both.generate(list(range(50)), transfer_id="x2")
        handed = await both.generate([*PROMPT[:30], *range(500, 520)], transfer_id="x3")
        assert handed.reservation.start_token == 24
        assert handed.outcome is not None
        assert handed.outcome.cached_tokens < 24
        assert min(sent.times.start_token for sent in sent_layers(handed.outcome.reports)) == 24


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
