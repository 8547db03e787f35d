"""Events keep their order, are joined, and end as the engine's iterator ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, InternalError, TransferFailed
from headrace_decode.event_buffer import EventBuffer
from headrace_engine.interface import DecodeEnded, DecodeEvent, DecodeTokens


async def yielding(
    *events: DecodeEvent, error: Exception | None = None
) -> AsyncIterator[DecodeEvent]:
    for event in events:
        yield event
        await asyncio.sleep(0)
    if error is not None:
        raise error


async def test_buffered_events_are_read_at_once() -> None:
    tokens = [DecodeTokens((number,)) for number in range(5)]
    buffer = EventBuffer(yielding(*tokens, DecodeEnded(True, 0)), "r")
    await asyncio.sleep(0.05)
    assert await buffer.read_one(Deadline.after(1)) == tokens[0]
    assert await buffer.read(Deadline.after(1)) == [*tokens[1:], DecodeEnded(True, 0)]


async def test_an_error_comes_after_the_events_before_it() -> None:
    buffer = EventBuffer(yielding(DecodeTokens((1,)), error=TransferFailed("gone")), "r")
    await asyncio.sleep(0.05)
    assert await buffer.read(Deadline.after(1)) == [DecodeTokens((1,))]
    with pytest.raises(TransferFailed):
        await buffer.read(Deadline.after(1))


async def test_an_end_without_an_event_is_an_error() -> None:
    buffer = EventBuffer(yielding(), "r")
    with pytest.raises(InternalError, match="without a reason"):
        await buffer.read(Deadline.after(1))


async def test_waiting_ends_at_the_deadline() -> None:
    async def pending() -> AsyncIterator[DecodeEvent]:
        await asyncio.Event().wait()
        yield DecodeTokens((1,))

    buffer = EventBuffer(pending(), "r")
    with pytest.raises(DeadlineExceeded):
        await buffer.read(Deadline.after(0.05))
    assert await buffer.close()


async def test_closing_closes_the_engines_iterator() -> None:
    closed = asyncio.Event()

    async def held() -> AsyncIterator[DecodeEvent]:
        try:
            yield DecodeTokens((1,))
            await asyncio.Event().wait()
        finally:
            closed.set()

    buffer = EventBuffer(held(), "r")
    await buffer.read(Deadline.after(1))
    assert await buffer.close()
    assert closed.is_set()


async def test_a_reader_is_called_when_the_buffer_becomes_readable() -> None:
    proceed = asyncio.Event()

    async def source() -> AsyncIterator[DecodeEvent]:
        yield DecodeTokens((1,))
        yield DecodeTokens((2,))
        await proceed.wait()
        yield DecodeEnded(False, 0)

    buffer = EventBuffer(source(), "r")
    calls: list[int] = []
    buffer.notify(lambda: calls.append(1), Deadline.after(60))
    await asyncio.sleep(0.05)
    assert calls == [1]
    assert buffer.take() == [DecodeTokens((1,)), DecodeTokens((2,))]
    assert not buffer.readable
    proceed.set()
    await asyncio.sleep(0.05)
    assert calls == [1, 1]
    assert buffer.take() == [DecodeEnded(False, 0)]
    assert await buffer.close()


async def test_an_interrupt_comes_after_the_events_before_it() -> None:
    async def source() -> AsyncIterator[DecodeEvent]:
        yield DecodeTokens((1,))
        await asyncio.Event().wait()

    buffer = EventBuffer(source(), "r")
    await asyncio.sleep(0.05)
    buffer.interrupt(DeadlineExceeded("late"))
    assert buffer.take() == [DecodeTokens((1,))]
    with pytest.raises(DeadlineExceeded):
        buffer.take()
    assert await buffer.close()
