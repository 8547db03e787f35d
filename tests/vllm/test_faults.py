"""Failures between two vLLM engines cause no wrong token and lose no block."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest

from headrace_common.errors import Cancelled, HeadraceError, TransferFailed, TransferTimeout
from headrace_engine.interface import Arrived, DecodeEvent, PrefillOutcome, PrefillWork, Released
from headrace_kv.messages import Reservation
from headrace_kv.receive.receiver import IncomingTransfer, TransferSummary
from tests.decoding import EventSink, decoded
from tests.vllm.conftest import ON_PAIR
from tests.vllm.pair import TIMEOUT_S, Pair, prompt_of, reset
from tests.waiting import until

pytestmark = ON_PAIR


@dataclass(frozen=True, slots=True)
class Sending:
    """A request and the KV transfer that prefill sends. `waiting` is decode's wait for the KV."""

    events: AsyncGenerator[DecodeEvent]
    reservation: Reservation
    transfer: IncomingTransfer
    waiting: asyncio.Future[TransferSummary]
    prefill: asyncio.Future[PrefillOutcome]

    def has_a_layer(self) -> bool:
        """Whether prefill has acknowledged a layer."""
        return self.transfer.ledger is not None and self.transfer.ledger.ack_count > 0


async def start(pair: Pair, prompt: list[int], timeout_s: float = TIMEOUT_S) -> Sending:
    events = decoded(pair.decode, pair.work(prompt))
    reservation = await anext(events)
    assert isinstance(reservation, Reservation)
    transfer = pair.reserve(reservation)
    waiting = asyncio.ensure_future(transfer.wait())
    work = PrefillWork(tuple(prompt[:-1]), pair.target(reservation, timeout_s))
    prefill = asyncio.ensure_future(pair.prefill.prefill(work))
    return Sending(events, reservation, transfer, waiting, prefill)


async def test_a_request_aborted_before_its_reservation_leaves_no_blocks(pair: Pair) -> None:
    for delay_s in (0.0, 0.001, 0.01):
        events: list[DecodeEvent] = []
        work = pair.work(prompt_of(202))
        task = asyncio.create_task(pair.decode.decode(work, EventSink(events.append)))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait({task})
        if events:
            pair.decode.transfer_event(Released(work.transfer_id))
    await reset(pair.decode)


async def test_a_released_transfer_yields_no_token_and_caches_no_block(pair: Pair) -> None:
    prompt = prompt_of(203)
    plain = await pair.plain(prompt)
    await pair.reset()
    work = pair.work(prompt)
    events = decoded(pair.decode, work)
    assert isinstance(await anext(events), Reservation)
    pair.decode.transfer_event(Released(work.transfer_id))
    with pytest.raises(TransferFailed):
        await anext(events)
    after = await pair.plain(prompt)
    await pair.reset()
    assert after.end is not None
    assert after.end.cached_tokens == 0
    assert after.token_ids == plain.token_ids


async def test_a_transfer_after_its_deadline_fails_on_both_sides(pair: Pair) -> None:
    prompt = prompt_of(1400)
    sending = await start(pair, prompt, timeout_s=0.15)
    with pytest.raises((TransferTimeout, TransferFailed)):
        await sending.prefill
    # Prefill is quiet, so its blocks are free.
    await reset(pair.prefill)
    with pytest.raises(HeadraceError):
        await sending.waiting
    with pytest.raises(TransferFailed):
        await anext(sending.events)
    assert pair.released[-1] == sending.reservation.transfer_id
    await reset(pair.decode)
    again = await pair.split(prompt)
    await pair.reset()
    plain = await pair.plain(prompt)
    await pair.reset()
    assert again.token_ids == plain.token_ids


async def cancelled_in_flight(pair: Pair, prompt: list[int], *, by_decode: bool) -> bool:
    """Cancels a transfer after its first layer. False if all of it was there before the cancellation took effect."""
    sending = await start(pair, prompt)
    transfer_id = sending.reservation.transfer_id
    await until(sending.has_a_layer)
    start_s = time.monotonic()
    if by_decode:
        pair.receiver.cancel(transfer_id, "CANCELLED", "the client went away")
        await sending.events.aclose()
    else:
        sending.prefill.cancel()
    (sent, received) = await asyncio.gather(
        sending.prefill, sending.waiting, return_exceptions=True
    )
    assert time.monotonic() - start_s < 10
    assert pair.prefill.usage().running_requests == 0
    if isinstance(sent, PrefillOutcome) or isinstance(received, TransferSummary):
        await sending.events.aclose()
        pair.decode.transfer_event(Arrived(transfer_id))
        await pair.reset()
        return False
    assert isinstance(received, HeadraceError)
    assert isinstance(sent, Cancelled if by_decode else asyncio.CancelledError)
    await until(lambda: pair.released[-1:] == [transfer_id])
    if not by_decode:
        with pytest.raises(TransferFailed):
            await anext(sending.events)
    await pair.reset()
    return True


@pytest.mark.parametrize("by_decode", [False, True], ids=["prefill", "decode"])
async def test_a_transfer_that_a_side_cancels_is_quiet_when_prefill_returns(
    pair: Pair, by_decode: bool
) -> None:
    # A machine may stop this process until the engines have completed a transfer.
    for prompt_tokens in range(1401, 1406):
        if await cancelled_in_flight(pair, prompt_of(prompt_tokens), by_decode=by_decode):
            return
    pytest.fail("each of five transfers was complete before its cancellation")


async def test_a_prefill_cancelled_before_it_runs_ends_at_once(pair: Pair) -> None:
    prompt = prompt_of(90)
    target = pair.target(Reservation(pair.new_transfer_id(), (1, 2, 3), 0, 89))
    prefill = asyncio.ensure_future(pair.prefill.prefill(PrefillWork(tuple(prompt[:-1]), target)))
    await asyncio.sleep(0)
    start_s = time.monotonic()
    prefill.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prefill
    assert time.monotonic() - start_s < 10
    await reset(pair.prefill)
