"""Events keep their order, are joined, and end as the engine's iterator ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, InternalError, TransferFailed
from headrace_decode.event_buffer import EventBuffer
from headrace_engine.interface import DecodeEnded, DecodeEvent, DecodeEvents, DecodeTokens


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


class _Followed(DecodeEvents):
    """Events that a test puts in."""

    def __init__(self) -> None:
        self.events: list[DecodeEvent] = []
        self.error: Exception | None = None
        self.aborts = 0
        self._on_events: Callable[[], None] | None = None

    def put(self, *events: DecodeEvent, error: Exception | None = None) -> None:
        self.events += events
        self.error = error
        assert self._on_events is not None
        self._on_events()

    def follow(self, on_events: Callable[[], None]) -> None:
        self._on_events = on_events

    def take(self) -> list[DecodeEvent]:
        if self.error is not None:
            raise self.error
        events, self.events = self.events, []
        return events

    def abort(self) -> None:
        self.aborts += 1

    async def __anext__(self) -> DecodeEvent:
        raise AssertionError("followed events are not iterated")


async def test_a_failure_of_followed_events_is_raised() -> None:
    source = _Followed()
    buffer = EventBuffer(source, "r")
    source.put(error=TransferFailed("gone"))
    assert buffer.readable
    with pytest.raises(TransferFailed):
        buffer.take()
    assert await buffer.close()


async def test_an_interrupt_comes_after_the_followed_events_before_it() -> None:
    source = _Followed()
    buffer = EventBuffer(source, "r")
    source.put(DecodeTokens((1,)))
    buffer.interrupt(DeadlineExceeded("late"))
    assert source.aborts == 1
    assert buffer.take() == [DecodeTokens((1,))]
    with pytest.raises(DeadlineExceeded):
        buffer.take()
    await buffer.close()
