"""Changes of a cache become messages for several subscribers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from itertools import islice

import pytest

from headrace.worker.v1 import worker_pb2
from headrace_common.errors import InternalError, QueueFull
from headrace_engine import prefix_events
from headrace_engine.prefix_events import PrefixEventPublisher, Subscription
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.events import unpack_hashes, xor_of

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


async def test_simultaneous_changes_are_one_message(events: PrefixEventPublisher) -> None:
    with events.subscribe(0) as subscription:
        subscriber = Subscriber(subscription)
        assert kinds(await subscriber.read(2)) == ["snapshot", "heartbeat"]
        # A prompt that is cached block by block, another, then evictions.
        for block in range(1, 6):
            events.stored(block - 1 or None, [block])
        events.stored(None, [11, 12])
        events.removed([12])
        events.removed([5, 4])
        messages = await subscriber.read(2)
        assert kinds(messages) == ["stored", "removed"]
        assert unpack_hashes(messages[0].stored) == [1, 2, 3, 4, 5, 11, 12]
        assert unpack_hashes(messages[1].removed) == [12, 5, 4]
        assert [message.sequence for message in messages] == [1, 2]
        assert messages[1].announced_count == 4
        assert messages[1].announced_xor == xor_of([1, 2, 3, 11])


async def test_order_is_kept(events: PrefixEventPublisher) -> None:
    with events.subscribe(0) as subscription:
        subscriber = Subscriber(subscription)
        await subscriber.read(2)
        events.stored(None, [1])
        events.removed([1])
        events.stored(None, [1])
        assert kinds(await subscriber.read(3)) == ["stored", "removed", "stored"]
        events.stored(1, [2])
        events.cleared()
        events.stored(None, [3])
        messages = await subscriber.read(2)
        # Changes before `cleared` are not published.
        assert kinds(messages) == ["cleared", "stored"]
        assert messages[1].announced_count == 1


async def test_a_returning_subscriber_gets_the_missed_events(
    events: PrefixEventPublisher,
) -> None:
    events.stored(None, [1])
    with events.subscribe(0) as subscription:
        subscriber = Subscriber(subscription)
        assert kinds(await subscriber.read(3)) == ["snapshot", "heartbeat", "stored"]
    events.stored(1, [2])
    await asyncio.sleep(0.05)
    with events.subscribe(1) as subscription:
        messages = await Subscriber(subscription).read(2)
        assert kinds(messages) == ["stored", "heartbeat"]
        assert messages[1].announced_count == 2
    # An unknown sequence gives a snapshot.
    with events.subscribe(9) as subscription:
        assert kinds(await Subscriber(subscription).read(2)) == ["snapshot", "heartbeat"]


async def test_heartbeats_are_sent_in_time_among_many_events(events: PrefixEventPublisher) -> None:
    with events.subscribe(0) as subscription:
        subscriber = Subscriber(subscription, interval_s=0.1)
        await subscriber.read(2)
        seen: list[str | None] = []
        for block in range(1, 40):
            events.stored(None, [block])
            seen += kinds(await subscriber.read(1))
        assert 2 <= seen.count("heartbeat") <= 12
        # Each heartbeat above left one event to read.
        quiet = kinds(await subscriber.read(seen.count("heartbeat") + 2))
        assert quiet[-1] == "heartbeat"


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


def test_deployments_models_and_block_sizes_hash_differently() -> None:
    tokens = list(range(64))
    found: set[int] = set()
    scopes = [(5, "m", 8), (6, "m", 8), (5, "n", 8), (5, "m", 16)]
    for key, model, size in scopes:
        events = PrefixEventPublisher(WorkerRef("w-0", "1" * 16), size)
        events.set_hash_key(key, model)
        assert events.hasher is not None
        found.update(islice(events.hasher.hashes(tokens), 4))
    assert len(found) == 4 * len(scopes)
