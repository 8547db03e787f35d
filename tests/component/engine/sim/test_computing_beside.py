"""A decode engine computes a prompt's last tokens while the prefill engine computes the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from headrace_common.errors import Cancelled, HeadraceError
from headrace_engine.interface import Arrived, DecodeEvent, DecodeWork, LayersArrived
from headrace_engine.sim.engine import SimEngine
from headrace_kv.receive.transfer import TransferState
from tests.component.engine.sim.support import (
    Pair,
    Started,
    advance_until,
    close,
    decode_work,
    expected_tokens,
    pair,
    tokens_of,
)
from tests.sim_clock import ManualClock
from tests.waiting import until

LAYERS = 4
PROMPT = list(range(100, 164))
# A layer of a step with 16 tokens takes 16 s.
MODEL = f"sim:layers={LAYERS},context=512,prefill_s_per_token={LAYERS}"
LAYER_S = 16.0


def beside(prompt: list[int], computes_from: int, transfer_id: str = "x1") -> DecodeWork:
    """A request that computes its prompt from that token on."""
    work = decode_work(prompt, transfer_id=transfer_id, remote_kv=True)
    return replace(work, computes_from=computes_from)


@asynccontextmanager
async def computing(
    work: DecodeWork, clock: ManualClock, step_tokens: int = 16
) -> AsyncIterator[tuple[Pair, Started]]:
    """Both engines with the request, of which the decode engine gets each layer that is whole."""
    async with pair(
        model=MODEL,
        digest="off",
        max_num_batched_tokens=step_tokens,
        prefill_clock=clock,
        decode_clock=clock,
    ) as both:
        started = await start(both, work)
        yield both, started


async def start(both: Pair, work: DecodeWork) -> Started:
    """Starts the request and its prefill, as the services do."""
    started = await both.start(work)

    def layers_arrived(layer_count: int) -> None:
        both.decode.transfer_event(LayersArrived(work.transfer_id, layer_count))

    started.transfer.notify(layers_arrived)
    return started


async def finish(both: Pair, started: Started, work: DecodeWork, clock: ManualClock) -> None:
    """Reads the answer, which must be the model's."""
    await advance_until(started.prefill.done, clock)
    await started.transfer.wait()
    both.decode.transfer_event(Arrived(work.transfer_id))

    async def read() -> list[DecodeEvent]:
        return [event async for event in started.reader]

    reading = asyncio.create_task(read())
    await advance_until(reading.done, clock)
    assert tokens_of(reading.result()) == expected_tokens(both.decode, work)


def whole_layers(started: Started) -> int:
    ledger = started.transfer.ledger
    return 0 if ledger is None else ledger.whole_layers


def is_computed(engine: SimEngine, tokens: int) -> bool:
    sequence = engine._requests.find("x1")
    return sequence is None or sequence.computed >= tokens


async def until_layers(started: Started, clock: ManualClock, count: int) -> None:
    """Advances the clock layer by layer until so many are whole, and decode awaits the next one."""
    await until(lambda: started.transfer.state is not TransferState.RESERVED)
    while (layers := whole_layers(started)) < count:
        await clock.advance(LAYER_S)
        await until(lambda: whole_layers(started) > layers)


@pytest.mark.parametrize("length", [33, 64])
@pytest.mark.parametrize("computes_from", [8, 16, 24, 32])
async def test_the_answer_is_the_same_wherever_the_prompt_is_divided(
    length: int, computes_from: int
) -> None:
    work, clock = beside(PROMPT[:length], computes_from), ManualClock()
    async with computing(work, clock) as (both, started):
        assert started.reservation.end_token == computes_from
        await finish(both, started, work, clock)


async def test_both_compute_at_the_same_time_and_decode_waits_in_each_layer() -> None:
    work, clock = beside(PROMPT[:32], 16), ManualClock()
    async with computing(work, clock) as (both, started):
        arrivals = both.decode._stepper.ranks.arrivals
        for count in range(1, LAYERS):
            await until_layers(started, clock, count)
            await until(lambda: bool(arrivals.awaited))
            assert arrivals.lacks(count)
        await until_layers(started, clock, LAYERS)
        await until(lambda: not arrivals.lacks(LAYERS - 1))
        # Decode has its last layer one layer later. One after the other would take twice as long.
        await advance_until(lambda: is_computed(both.decode, 32), clock)
        assert clock.now_s() < 1.5 * LAYERS * LAYER_S
        await finish(both, started, work, clock)
    assert both.decode.step_times.prompt_steps == 0


@pytest.mark.parametrize("count", range(LAYERS))
@pytest.mark.parametrize("cause", ["prefill", "decode"])
async def test_a_failure_at_each_layer_leaves_nothing_and_no_wrong_kv(
    count: int, cause: str
) -> None:
    work, clock = beside(PROMPT, 16), ManualClock()
    async with computing(work, clock) as (both, started):
        await until_layers(started, clock, count)
        if cause == "prefill":
            started.prefill.cancel()
            await until(started.prefill.done)
        else:
            both.receiver.cancel("x1", Cancelled.reason, "its layers were late")
        with pytest.raises(HeadraceError):
            await started.transfer.wait()
        if count:
            both.decode.transfer_event(LayersArrived("x1", LAYERS))
        await close(started.reader)
        await advance_until(started.prefill.done, clock)
        again = beside(PROMPT, 32, "x2")
        await advance_until(lambda: both.decode._pools.held_count == 0, clock)
        # Nothing of the failed request is cached or announced, not even what decode has computed.
        assert not both.decode._pools._pools[0]._cached
        starting = asyncio.create_task(start(both, again))
        await advance_until(starting.done, clock)
        second = starting.result()
        assert second.reservation.start_token == 0
        await finish(both, second, again, clock)


async def test_blocks_of_a_request_that_left_stay_until_nothing_writes_into_them() -> None:
    work, clock = beside(PROMPT, 16), ManualClock()
    async with computing(work, clock) as (both, started):
        await until_layers(started, clock, 1)
        await until(lambda: bool(both.decode._requests.planner.partial.receives))
        both.decode.transfer_event(LayersArrived("x1", LAYERS))
        await close(started.reader)
        planner = both.decode._requests.planner
        count = len(started.reservation.block_ids)
        await advance_until(lambda: both.decode._pools.held_count == count, clock)
        assert planner.holds
        await advance_until(started.prefill.done, clock)
        both.decode.transfer_event(Arrived("x1"))
        await until(lambda: not planner.holds)
