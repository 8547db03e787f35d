"""A decode engine's reservations, without a sender: which blocks are held, and until when."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_engine.sim.engine import SimEngine
from tests.component.engine.sim.support import (
    answer_of,
    close,
    decode_engine,
    decode_work,
)
from tests.waiting import until

PROMPT = list(range(100, 139))


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with decode_engine() as engine:
        yield engine


@pytest.mark.parametrize("ending", ["arrived", "released"])
async def test_an_aborted_reservation_stays_held_until_its_transfer_ends(
    engine: SimEngine, ending: str
) -> None:
    before = engine.free_block_count()
    reader = engine.decode(decode_work(PROMPT, remote_kv=True))
    await anext(reader)
    await close(reader)
    await answer_of(engine, decode_work([1, 2, 3], transfer_id="x2"))
    # 39 tokens of prompt and 5 of the answer: 6 blocks of 8.
    assert engine.free_block_count() == before - 6
    getattr(engine, ending)("x1")
    await until(lambda: engine.free_block_count() == before)
    getattr(engine, ending)("x1")


async def test_an_unread_reservation_is_released_with_its_request(engine: SimEngine) -> None:
    before = engine.free_block_count()
    reader = engine.decode(decode_work(PROMPT, remote_kv=True))
    waiting = asyncio.ensure_future(anext(reader))
    while engine.free_block_count() == before:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.free_block_count() == before
