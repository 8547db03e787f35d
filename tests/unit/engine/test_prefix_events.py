"""Changes of a cache become messages for several subscribers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from headrace.worker.v1 import worker_pb2
from headrace_common.errors import InternalError, QueueFull
from headrace_engine import prefix_events
from headrace_engine.prefix_events import PrefixEventPublisher, Subscription
from headrace_kv.layout import WorkerRef

Message = worker_pb2.SubscribeKvEventsResponse


@pytest.fixture
def events() -> PrefixEventPublisher:
    return PrefixEventPublisher(WorkerRef("w-0", "1" * 16), block_tokens=8, flush_s=0.01)


def kinds(messages: list[Message]) -> list[str | None]:
    return [message.WhichOneof("event") for message in messages]


class Subscriber:
    def __init__(self, subscription: Subscription, interval_s: float = 60.0) -> None:
        self._messages: AsyncIterator[Message] = subscription.messages(interval_s)

    async def read(self, count: int) -> list[Message]:
        async with asyncio.timeout(5):
            return [await anext(self._messages) for _ in range(count)]


@pytest.mark.parametrize("limit", ["BUFFERED_MESSAGES_MAX", "BUFFERED_BYTES_MAX"])
async def test_a_full_buffer_ends_one_subscription_only(
    events: PrefixEventPublisher, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(prefix_events, limit, 10 if limit == "BUFFERED_MESSAGES_MAX" else 500)
    with events.subscribe(0) as slow, events.subscribe(0) as fast:
        slow_subscriber, fast_subscriber = Subscriber(slow), Subscriber(fast)
        await slow_subscriber.read(2)
        await fast_subscriber.read(2)
        for block in range(1, 16):
            events.stored(None, [block])
            assert kinds(await fast_subscriber.read(1)) == ["stored"]
        with pytest.raises(QueueFull):
            await slow_subscriber.read(16)


async def test_the_number_of_subscriptions_is_bounded(
    events: PrefixEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_events, "SUBSCRIBERS_MAX", 2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(events.subscribe(0))
        with pytest.raises(QueueFull):
            stack.enter_context(events.subscribe(0))
    for _ in range(3):
        with events.subscribe(0):
            pass


def test_the_key_can_be_set_once(events: PrefixEventPublisher) -> None:
    events.set_hash_key(5, "m")
    assert events.hasher is not None
    with pytest.raises(InternalError):
        events.set_hash_key(5, "m")
