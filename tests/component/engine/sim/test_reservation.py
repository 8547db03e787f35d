"""A decode engine's reservations, without a sender: which blocks are held, and until when."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_common.errors import TransferFailed
from headrace_engine.interface import Arrived, DecodeEnded, DecodeTokens, Released, TransferEvent
from headrace_engine.sim.engine import SimEngine
from headrace_kv.messages import Reservation
from tests.component.engine.sim.support import (
    answer_of,
    check_answer,
    close,
    decode_engine,
    decode_work,
    reserve,
)
from tests.decoding import decoded
from tests.sim_blocks import free_blocks
from tests.waiting import until

PROMPT = list(range(100, 139))


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with decode_engine() as engine:
        yield engine


@pytest.mark.parametrize("cached, start, block_count", [(0, 0, 5), (20, 16, 3)])
async def test_a_reservation_holds_what_is_missing_but_the_last_token(
    engine: SimEngine, cached: int, start: int, block_count: int
) -> None:
    if cached:
        await answer_of(engine, decode_work(PROMPT[:cached], transfer_id="x0"))
    reader = decoded(engine, decode_work(PROMPT, remote_kv=True))
    reservation = await reserve(reader)
    assert (reservation.start_token, reservation.end_token) == (start, 38)
    assert len(reservation.block_ids) == block_count
    engine.transfer_event(Arrived("x1"))
    assert isinstance(await anext(reader), DecodeTokens)
    await close(reader)


async def test_a_cache_that_was_never_sent_gives_another_answer(engine: SimEngine) -> None:
    tokens: list[int] = []
    async for event in decoded(engine, decode_work(PROMPT, remote_kv=True)):
        if isinstance(event, Reservation):
            engine.transfer_event(Arrived("x1"))
        elif isinstance(event, DecodeTokens):
            tokens.extend(event.token_ids)
    assert len(tokens) == 6
    assert tuple(tokens) != engine.model.expected_tokens(PROMPT, 6)


@pytest.mark.parametrize("prompt", [[7], PROMPT[:33]])
async def test_no_transfer_is_needed_when_only_the_last_token_is_missing(
    engine: SimEngine, prompt: list[int]
) -> None:
    await answer_of(engine, decode_work(prompt, transfer_id="x0"))
    tokens, end, events = await answer_of(engine, decode_work(prompt, remote_kv=True))
    reservation = events[0]
    assert isinstance(reservation, Reservation)
    assert reservation.start_token == reservation.end_token == len(prompt) - 1
    assert reservation.block_ids == ()
    assert end.cached_tokens == len(prompt) - 1
    assert tokens == engine.model.expected_tokens(prompt, 6)


async def test_blocks_are_shared_only_once_they_have_arrived(engine: SimEngine) -> None:
    first = decoded(engine, decode_work(PROMPT, remote_kv=True))
    await anext(first)
    second = decoded(engine, decode_work(PROMPT, transfer_id="x2", remote_kv=True))
    assert (await reserve(second)).start_token == 0
    engine.transfer_event(Arrived("x1"))
    third = decoded(engine, decode_work(PROMPT, transfer_id="x3", remote_kv=True))
    assert (await reserve(third)).start_token == 32
    for reader in (first, second, third):
        await close(reader)
    engine.transfer_event(Released("x2"))
    engine.transfer_event(Released("x3"))


@pytest.mark.parametrize("ending", [Arrived("x1"), Released("x1")])
async def test_an_aborted_reservation_stays_held_until_its_transfer_ends(
    engine: SimEngine, ending: TransferEvent
) -> None:
    before = free_blocks(engine)
    reader = decoded(engine, decode_work(PROMPT, remote_kv=True))
    await anext(reader)
    await close(reader)
    await answer_of(engine, decode_work([1, 2, 3], transfer_id="x2"))
    # 39 tokens of prompt and 5 of the answer: 6 blocks of 8.
    assert free_blocks(engine) == before - 6
    engine.transfer_event(ending)
    await until(lambda: free_blocks(engine) == before)
    engine.transfer_event(ending)


async def test_a_released_reservation_fails_its_request(engine: SimEngine) -> None:
    reader = decoded(engine, decode_work(PROMPT, remote_kv=True))
    await anext(reader)
    engine.transfer_event(Released("x1"))
    with pytest.raises(TransferFailed):
        await anext(reader)


async def test_reports_of_other_or_ended_transfers_change_nothing(engine: SimEngine) -> None:
    reader = decoded(engine, decode_work(PROMPT, remote_kv=True))
    await reserve(reader)
    free = free_blocks(engine)
    engine.transfer_event(Arrived("x2"))
    engine.transfer_event(Released("x2"))
    waiting = asyncio.ensure_future(anext(reader))
    await check_answer(engine, decode_work(PROMPT, transfer_id="x3"))
    assert not waiting.done()
    assert free_blocks(engine) == free
    engine.transfer_event(Arrived("x1"))
    assert isinstance(await waiting, DecodeTokens)
    # The request has its cache now, so a late report must not fail it.
    engine.transfer_event(Released("x1"))
    rest = [event async for event in reader]
    assert isinstance(rest[-1], DecodeEnded)
