"""Publishes the changes of one engine's prefix cache to its subscribers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Final, Literal

from headrace.worker.v1 import worker_pb2
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import InternalError, QueueFull
from headrace_engine.prefix_event_log import PrefixEventLog
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import LOAD_TIME_MAX_S, KvEvent, Tier, event_to_proto
from headrace_kv.prefix.hashing import PrefixHasher, key_fingerprint, prefix_hasher

FLUSH_S: Final = 0.05
SUBSCRIBERS_MAX: Final = 64
SETTLED_S: Final = 1.0
BUFFERED_MESSAGES_MAX: Final = 4_096
BUFFERED_BYTES_MAX: Final = 4 << 20

_Kind = Literal["stored", "removed", "cleared"]
Message = worker_pb2.SubscribeKvEventsResponse


class PrefixEventPublisher:
    """The prefixes that one worker's engine caches, in blocks of `block_tokens`. One event loop owns it.

    The engine reports blocks by their hashes, which `hasher` computes. It exists from `set_hash_key`
    on; blocks that were cached before are not published. Changes are numbered and sent together, at
    most `flush_s` after the first. A slow subscriber cannot delay the engine: a subscription with a
    full buffer ends. `tiers` are those where the engine keeps blocks.
    """

    def __init__(
        self,
        ref: WorkerRef,
        block_tokens: int,
        flush_s: float = FLUSH_S,
        tiers: Sequence[Tier] = (Tier.DEVICE,),
    ) -> None:
        self.ref = ref
        self.block_tokens = block_tokens
        self.hasher: PrefixHasher | None = None
        self.hashing: worker_pb2.KvHashing | None = None
        """Identifies the hash key and block size, so that others can compare them; None before `set_hash_key`."""
        self._flush_s = flush_s
        self.tiers = tuple(tiers)
        self._load_s_per_block: dict[Tier, float] = {}
        self._stored_blocks: dict[Tier, int] = {}
        self._log = PrefixEventLog(ref.incarnation, tiers)
        self._pending: list[_Change] = []
        self._flush: asyncio.TimerHandle | None = None
        self._key_listeners: list[Callable[[int], None]] = []
        self._subscriptions: set[Subscription] = set()

    def set_hash_key(self, prefix_hash_key: int, model: str) -> None:
        """Starts publishing with a deployment's key and the served model. Raises InternalError the second time."""
        if self.hasher is not None:
            raise InternalError("the key of prefix hashes was set before")
        self.hasher = prefix_hasher(prefix_hash_key, model, self.block_tokens)
        self.hashing = worker_pb2.KvHashing(
            key_fingerprint=key_fingerprint(prefix_hash_key), block_tokens=self.block_tokens
        )
        for listener in self._key_listeners:
            listener(prefix_hash_key)

    def on_hash_key(self, listener: Callable[[int], None]) -> None:
        """Calls the listener with the deployment's key once that is known."""
        self._key_listeners.append(listener)

    def stored(self, parent: int | None, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """Consecutive blocks after `parent` are cached in `tier` now. None is the start of a prompt."""
        self._stored_blocks[tier] = self._stored_blocks.get(tier, 0) + len(hashes)
        last = self._pending[-1] if self._pending else None
        if last is not None and last.of == ("stored", tier) and parent == last.hashes[-1]:
            last.hashes.extend(hashes)
        elif hashes:
            self._enqueue(_Change("stored", parent, list(hashes), tier))

    def removed(self, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """These blocks are no longer cached in `tier`."""
        last = self._pending[-1] if self._pending else None
        if last is not None and last.of == ("removed", tier):
            last.hashes.extend(hashes)
        elif hashes:
            self._enqueue(_Change("removed", None, list(hashes), tier))

    def cleared(self) -> None:
        """No block is cached in any tier."""
        self._pending.clear()
        self._enqueue(_Change("cleared", None, [], Tier.DEVICE))

    def stored_blocks(self) -> dict[Tier, int]:
        """Blocks that were stored since the start, by tier. One that was stored again counts again."""
        return dict(self._stored_blocks)

    def load_measured(self, tier: Tier, seconds_per_block: float) -> None:
        """To load a block of `tier` takes so long. The next heartbeats state it."""
        self._load_s_per_block[tier] = min(seconds_per_block, LOAD_TIME_MAX_S)

    @contextmanager
    def subscribe(self, since_sequence: int) -> Iterator[Subscription]:
        """A subscription to every change after `since_sequence`, or from a snapshot on. Raises QueueFull."""
        if len(self._subscriptions) >= SUBSCRIBERS_MAX:
            raise QueueFull(
                f"{len(self._subscriptions)} routers subscribe to this worker's KV events already",
                metadata={"max_subscribers": str(SUBSCRIBERS_MAX)},
            )
        missed = self._log.replay(since_sequence) if since_sequence else None
        if missed is None:
            missed = self._log.snapshot()
        subscription = Subscription(self, missed)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def heartbeats(self) -> Iterator[Message]:
        """A heartbeat for each tier."""
        for event in self._log.heartbeats():
            message = event_to_proto(event)
            if self.hashing is not None:
                message.heartbeat.hashing.CopyFrom(self.hashing)
            load_s = self._load_s_per_block.get(Tier(event.tier))
            if load_s is not None:
                message.heartbeat.load_time_per_block.CopyFrom(duration_from_seconds(load_s))
            yield message

    def _enqueue(self, change: _Change) -> None:
        self._pending.append(change)
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_later(self._flush_s, self._send_pending)

    def _send_pending(self) -> None:
        self._flush = None
        pending, self._pending = self._pending, []
        for (kind, tier), changes in groupby(pending, key=lambda change: change.of):
            for event in self._publish(kind, tier, list(changes)):
                if self._subscriptions:
                    message = event_to_proto(event)
                    for subscription in self._subscriptions:
                        subscription.put(message)

    def _publish(self, kind: _Kind, tier: Tier, changes: list[_Change]) -> list[KvEvent]:
        match kind:
            case "stored":
                chains = [(one.parent, one.hashes) for one in changes]
                return self._log.stored_chains(chains, tier)
            case "removed":
                return self._log.removed(changes[0].hashes, tier)
            case "cleared":
                return self._log.cleared()


class _Change:
    """A change that was not published yet."""

    __slots__ = ("hashes", "of", "parent")

    def __init__(self, kind: _Kind, parent: int | None, hashes: list[int], tier: Tier) -> None:
        self.of = (kind, tier)
        self.parent = parent
        self.hashes = hashes


class Subscription:
    """One subscriber's messages, `missed` events first."""

    def __init__(self, publisher: PrefixEventPublisher, missed: Sequence[KvEvent]) -> None:
        self._publisher = publisher
        self._missed = missed
        self._buffer: deque[Message] = deque()
        self._buffered_bytes = 0
        self._overrun = False
        self._changed = asyncio.Event()

    def put(self, message: Message) -> None:
        """Buffers a message. A full buffer ends the subscription; the caller never waits."""
        if self._overrun:
            return
        self._buffer.append(message)
        self._buffered_bytes += message.ByteSize()
        if len(self._buffer) > BUFFERED_MESSAGES_MAX or self._buffered_bytes > BUFFERED_BYTES_MAX:
            self._overrun = True
            self._buffer.clear()
        self._changed.set()

    async def messages(self, interval_s: float) -> AsyncIterator[Message]:
        """Yields without end. Heartbeats for each tier follow the missed events, later ones within 1 s, and then every
        interval.

        Raises QueueFull when messages are read too slowly.
        """
        missed, self._missed = self._missed, ()
        for event in missed:
            yield event_to_proto(event)
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            while self._buffer:
                message = self._buffer.popleft()
                self._buffered_bytes -= message.ByteSize()
                yield message
                # A digest soon shows whether the events have left both sides equal.
                due_s = min(due_s, loop.time() + SETTLED_S)
            if self._overrun:
                raise QueueFull("KV events come faster than they are read: subscribe again")
            if loop.time() >= due_s:
                due_s = loop.time() + interval_s
                for heartbeat in self._publisher.heartbeats():
                    yield heartbeat
                continue
            self._changed.clear()
            try:
                async with asyncio.timeout_at(due_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
