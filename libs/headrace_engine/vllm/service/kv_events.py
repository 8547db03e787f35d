"""Follows vLLM's own KV events, and names the blocks as routers do."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from headrace_common.tasks import end_task, run_forever
from headrace_engine.prefix.event_publisher import PrefixEventPublisher
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.hashing import CHECKPOINT_BLOCKS

log = logging.getLogger(__name__)

UNREAD_BATCHES_MAX: Final = 100_000
_DEVICE_MEDIUM: Final = "GPU"
# Of its other media, whatever they are called, vLLM's connectors load blocks as from storage.
_TIERS: Final = {_DEVICE_MEDIUM: Tier.DEVICE, "CPU": Tier.HOST}
_ATTENTION_KINDS: Final = (None, "full_attention", "mla_attention")


def events_endpoint(link_path: Path) -> str:
    """Where vLLM publishes its events: a socket beside the link's."""
    return f"ipc://{link_path}.events"


@dataclass(slots=True)
class _Block:
    """A block that vLLM can find, under a hash of its own, in `copies` places.

    It is the `offset`th since the station named `station`, None at the start of a prompt; `words` are its token ids and
    `before` is the block before it, kept while both are of one stretch. `copies` counts those in each tier.
    """

    name: int
    station: int | None
    offset: int
    words: bytes
    before: _Block | None
    copies: list[int] = field(default_factory=lambda: [0] * (max(Tier) + 1))

    @property
    def parent(self) -> int | None:
        """The name of the block before it."""
        return self.before.name if self.before is not None else self.station


class VllmPrefixes:
    """Turns vLLM's events, as they were decoded, into what `events` announces.

    In each tier a block counts from its first copy to its last; tiers that `events` does not have are left out. One
    whose beginning is unknown cannot be named, nor one that depends on more than its tokens. Some connectors name a
    block that they have copied by its hash alone, which will do for one that is known.
    """

    def __init__(self, events: PrefixEventPublisher) -> None:
        self._events = events
        self._blocks: dict[int | bytes, _Block] = {}
        self._odd_sizes: set[int] = set()
        # Blocks of states are cached one by one, and of two groups with attention one says enough.
        self._group_index: int | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """One event; those of no consequence are passed over."""
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.forget()
        elif self._concerns(event):
            tier = _TIERS.get(event.get("medium") or _DEVICE_MEDIUM, Tier.DISK)
            if tier not in self._events.tiers:
                return
            if kind == "BlockStored" and event["token_ids"]:
                self._store(event, tier)
            elif kind == "BlockStored":
                self._copy(event["block_hashes"], tier)
            elif kind == "BlockRemoved":
                self._remove(event["block_hashes"], tier)

    def _concerns(self, event: Mapping[str, Any]) -> bool:
        """Whether it is of the group that is followed, the first to store blocks of attention."""
        index = event.get("group_idx")
        is_attention = event.get("kv_cache_spec_kind") in _ATTENTION_KINDS
        if self._group_index is None and event["type"] == "BlockStored" and is_attention:
            self._group_index = index
        return index is None or index == self._group_index

    def forget(self) -> None:
        """Nothing is known to be cached any more."""
        self._blocks.clear()
        self._events.cleared()

    def _fits(self, block_tokens: int) -> bool:
        """Whether routers look for blocks of this size; the first of another is told of."""
        if block_tokens == self._events.block_tokens:
            return True
        if block_tokens not in self._odd_sizes:
            self._odd_sizes.add(block_tokens)
            log.warning(
                "vLLM caches blocks of %d tokens, routers look for blocks of %d: those get no credit",
                block_tokens,
                self._events.block_tokens,
            )
        return False

    def _copy(self, block_hashes: Sequence[int | bytes], tier: Tier) -> None:
        for block_hash in block_hashes:
            block = self._blocks.get(block_hash)
            if block is not None:
                block.copies[tier] += 1
                self._events.stored(block.parent, [block.name], tier)

    def _store(self, event: Mapping[str, Any], tier: Tier) -> None:
        hashes, token_ids, size = event["block_hashes"], event["token_ids"], event["block_size"]
        parent_hash = event["parent_block_hash"]
        parent = None if parent_hash is None else self._blocks.get(parent_hash)
        if (
            self._events.hasher is None
            or (parent_hash is not None and parent is None)
            or not self._fits(size)
            or len(token_ids) != len(hashes) * size
            or any(event.get("extra_keys") or ())
        ):
            return
        stretch: list[_Block] = []
        ancestor = None if parent is None or parent.offset == CHECKPOINT_BLOCKS - 1 else parent
        while ancestor is not None:
            stretch.insert(0, ancestor)
            ancestor = ancestor.before
        station = parent.name if parent and not stretch else stretch[0].station if stretch else None
        words = array("I", token_ids).tobytes()
        known_words = b"".join(block.words for block in stretch)
        names = self._events.hasher.hashes(known_words + words, station)[len(stretch) :]
        self._events.stored(parent.name if parent else None, names, tier)
        last, offset = (stretch[-1], len(stretch)) if stretch else (None, 0)
        for position, (block_hash, name) in enumerate(zip(hashes, names, strict=True)):
            block = self._blocks.get(block_hash)
            if block is None:
                own = words[4 * size * position : 4 * size * (position + 1)]
                block = self._blocks[block_hash] = _Block(name, station, offset, own, last)
            block.copies[tier] += 1
            offset += 1
            last = block
            if offset == CHECKPOINT_BLOCKS:
                station, last, offset = name, None, 0

    def _remove(self, block_hashes: Sequence[int | bytes], tier: Tier) -> None:
        gone: list[int] = []
        for block_hash in block_hashes:
            block = self._blocks.get(block_hash)
            if block is None or not block.copies[tier]:
                continue
            block.copies[tier] -= 1
            if not block.copies[tier]:
                gone.append(block.name)
                if not any(block.copies):
                    del self._blocks[block_hash]
        self._events.removed(gone, tier)


class KvEventReader:
    """Reads what vLLM publishes until closed. After a loss it starts from nothing."""

    def __init__(self, endpoint: str, events: PrefixEventPublisher) -> None:
        self._endpoint = endpoint
        self._prefixes = VllmPrefixes(events)
        self._context: zmq.asyncio.Context | None = None
        self._reader: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects as soon as vLLM is there."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.SUB)
        socket.set_hwm(UNREAD_BATCHES_MAX)
        socket.connect(self._endpoint)
        socket.subscribe(b"")
        self._reader = run_forever(self._read(socket), "vllm-kv-events")

    async def close(self) -> None:
        """Ends the task and closes the socket."""
        await end_task(self._reader)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        expected = 0
        while True:
            _, sequence_bytes, payload = await socket.recv_multipart()
            sequence = int.from_bytes(sequence_bytes)
            if sequence != expected:
                log.warning("%d batches of vLLM's KV events are lost", sequence - expected)
                self._prefixes.forget()
            expected = sequence + 1
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._prefixes.take(event)
