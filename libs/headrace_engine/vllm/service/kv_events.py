"""Converts vLLM's KV events to prefix announcements, with the block hashes that routers use."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq
import zmq.asyncio

from headrace_common.errors import ConfigError
from headrace_common.tasks import end_task, run_forever
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.vllm.service.prompts import image_hash
from headrace_kv.prefix.cache_salt import is_cache_salt
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.hashing import CHECKPOINT_BLOCKS
from headrace_kv.prefix.images import placeholder_words

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig

log = logging.getLogger(__name__)

UNREAD_BATCHES_MAX: Final = 100_000
_DEVICE_MEDIUM: Final = "GPU"
# All other media count as storage.
_TIERS: Final = {_DEVICE_MEDIUM: Tier.DEVICE, "CPU": Tier.HOST, "REMOTE": Tier.REMOTE}
_ATTENTION_KINDS: Final = (None, "full_attention", "mla_attention")


def events_endpoint(link_path: Path, data_parallel_rank: int = 0) -> str:
    """The socket on which vLLM publishes its events, beside the link's. Of rank 0 as vLLM is configured on any rank."""
    # With ranks, vLLM accepts no other names of files, and adds the rank to them.
    return f"ipc://{link_path}.inproc" + (f"_dp{data_parallel_rank}" if data_parallel_rank else "")


@dataclass(slots=True)
class _Block:
    """A block that vLLM has cached. `name`: its hash for routers.

    `parent`: name of the block before it, None for a prompt's first. `seed`: the seed of its hash chunk, which is the
    name of the block before the chunk, or the root of the prompt's salt. `offset`: its position in the chunk. `words`:
    its token ids. `before`: the block before it in the same chunk. `copies`: by tier.
    """

    name: int
    parent: int | None
    seed: int
    offset: int
    words: bytes
    before: _Block | None
    copies: list[int] = field(default_factory=lambda: [0] * (max(Tier) + 1))

    def add_copy(self, tier: Tier) -> None:
        self.copies[tier] += 1

    def remove_copy(self, tier: Tier) -> int:
        """Returns the number of copies that are left."""
        self.copies[tier] -= 1
        return self.copies[tier]


class VllmPrefixes:
    """Turns vLLM's decoded events into announcements of `events`.

    A tier has a block from its first copy to its last. Tiers that `events` does not have are ignored. So are blocks
    with an unknown parent, and blocks that depend on more than their tokens. Some connectors report a copied block by
    its hash alone, which works for a known block.
    """

    def __init__(self, events: PrefixEventPublisher) -> None:
        self._events = events
        self._blocks: dict[int | bytes, _Block] = {}
        self._other_sizes: set[int] = set()
        # Only one group with attention is followed: blocks of states are cached separately.
        self._group_index: int | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        """Applies one event. Ignores unknown kinds."""
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
        """Whether the event is of the followed group: the first one that has stored blocks of attention."""
        index = event.get("group_idx")
        is_attention = event.get("kv_cache_spec_kind") in _ATTENTION_KINDS
        if self._group_index is None and event["type"] == "BlockStored" and is_attention:
            self._group_index = index
        return index is None or index == self._group_index

    def forget(self) -> None:
        """Forgets all blocks, and announces that the cache is empty."""
        self._blocks.clear()
        self._events.cleared()

    def _fits(self, block_tokens: int) -> bool:
        """Whether routers use blocks of this size. Logs the first block of each other size."""
        if block_tokens == self._events.block_tokens:
            return True
        if block_tokens not in self._other_sizes:
            self._other_sizes.add(block_tokens)
            log.warning(
                "vLLM caches blocks of %d tokens, but routers use blocks of %d: these are not announced",
                block_tokens,
                self._events.block_tokens,
            )
        return False

    def _copy(self, block_hashes: Sequence[int | bytes], tier: Tier) -> None:
        for block_hash in block_hashes:
            block = self._blocks.get(block_hash)
            if block is not None:
                block.add_copy(tier)
                self._events.stored(block.parent, [block.name], tier)

    def _store(self, event: Mapping[str, Any], tier: Tier) -> None:
        hashes, token_ids, size = event["block_hashes"], event["token_ids"], event["block_size"]
        parent_hash = event["parent_block_hash"]
        parent = None if parent_hash is None else self._blocks.get(parent_hash)
        keys = _keys_of(event)
        if (
            self._events.hasher is None
            or (parent_hash is not None and parent is None)
            or not self._fits(size)
            or len(token_ids) != len(hashes) * size
            or keys is None
        ):
            return
        cache_salt, images = keys
        chunk: list[_Block] = []
        ancestor = None if parent is None or parent.offset == CHECKPOINT_BLOCKS - 1 else parent
        while ancestor is not None:
            chunk.insert(0, ancestor)
            ancestor = ancestor.before
        root = self._events.hasher.root_of(cache_salt)
        seed = chunk[0].seed if chunk else parent.name if parent else root
        words = _words_of(token_ids, images, size).tobytes()
        known_words = b"".join(block.words for block in chunk)
        names = self._events.hasher.hashes(known_words + words, seed)[len(chunk) :]
        self._events.stored(parent.name if parent else None, names, tier)
        last, offset = (chunk[-1], len(chunk)) if chunk else (None, 0)
        before = parent.name if parent else None
        for position, (block_hash, name) in enumerate(zip(hashes, names, strict=True)):
            block = self._blocks.get(block_hash)
            if block is None:
                own = words[4 * size * position : 4 * size * (position + 1)]
                block = _Block(name, before, seed, offset, own, last)
                self._blocks[block_hash] = block
            block.add_copy(tier)
            offset += 1
            before, last = name, block
            if offset == CHECKPOINT_BLOCKS:
                seed, last, offset = name, None, 0

    def _remove(self, block_hashes: Sequence[int | bytes], tier: Tier) -> None:
        gone: list[int] = []
        for block_hash in block_hashes:
            block = self._blocks.get(block_hash)
            if block is None or not block.copies[tier]:
                continue
            if not block.remove_copy(tier):
                gone.append(block.name)
                if not any(block.copies):
                    del self._blocks[block_hash]
        self._events.removed(gone, tier)


@dataclass(frozen=True, slots=True)
class _ImagePart:
    """An image that begins at token `start` of its block, before the block if negative."""

    content_hash: bytes
    start: int


_BlockImages = Sequence[Sequence[_ImagePart]]


def _keys_of(event: Mapping[str, Any]) -> tuple[str, _BlockImages] | None:
    """The salt of the blocks of an event, and the images in each block. None when they depend on more.

    The salt is "" for none, or for blocks with a parent. vLLM lists the further keys of each block. With an adapter,
    the first one is its name. Then follow pairs for images. The first block of a prompt has its salt, which depends on
    the adapter too.
    """
    adapter, is_first = event.get("lora_name"), event["parent_block_hash"] is None
    salt = ""
    images: list[list[_ImagePart]] = []
    for number, keys in enumerate(event.get("extra_keys") or [None]):
        others = list(keys or ())
        if adapter and others and others[0] == adapter:
            del others[0]
        parts = list(map(_image_part, filter(_is_pair, others)))
        texts = [key for key in others if not _is_pair(key)]
        if texts and is_first and not number and _is_salt(texts[0]):
            salt = texts.pop(0)
        found = [part for part in parts if part is not None]
        if texts or len(found) < len(parts):
            return None
        images.append(found)
    # Without a salt, the names of blocks would be those of the model alone.
    return None if adapter and is_first and not salt else (salt, images)


def _is_pair(key: Any) -> bool:
    return isinstance(key, list | tuple) and len(key) == 2


def _is_salt(key: Any) -> bool:
    return isinstance(key, str) and is_cache_salt(key)


def _image_part(pair: Sequence[Any]) -> _ImagePart | None:
    """None for an identifier that has no content hash."""
    identifier, start = pair
    found = image_hash(identifier) if isinstance(identifier, str) else None
    return None if found is None else _ImagePart(found, start)


def _words_of(token_ids: Sequence[int], images: _BlockImages, block_tokens: int) -> array[int]:
    """The token ids that routers hash, see hashed_token_ids. The placeholders of an image are equal tokens."""
    words = array("I", token_ids)
    for number, parts in enumerate(images):
        block_start = number * block_tokens
        ends = [*(part.start for part in parts[1:]), block_tokens]
        for part, end in zip(parts, ends, strict=False):
            start = max(0, part.start)
            block = token_ids[block_start + start : block_start + end]
            count = next((i for i, one in enumerate(block) if one != block[0]), len(block))
            first = block_start + start
            words[first : first + count] = placeholder_words(
                part.content_hash, start - part.start, count
            )
    return words


class KvEventReader:
    """Reads the events that vLLM publishes until closed. After lost events it forgets all blocks.

    They are sent on as they are where `also` says. vLLM, which this reader may not slow down, has one place for them.
    """

    def __init__(
        self,
        endpoint: str,
        events: PrefixEventPublisher,
        also: KVEventsConfig | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._prefixes = VllmPrefixes(events)
        self._also = also
        self._context: zmq.asyncio.Context | None = None
        self._reader: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects, also before vLLM binds the socket. Raises ConfigError where events cannot be sent on."""
        self._context = zmq.asyncio.Context()
        further = None if self._also is None else self._open_further(self._context, self._also)
        socket = self._context.socket(zmq.SUB)
        socket.set_hwm(UNREAD_BATCHES_MAX)
        socket.connect(self._endpoint)
        socket.subscribe(b"")
        self._reader = run_forever(partial(self._read, socket, further), "vllm-kv-events")

    def _open_further(
        self, context: zmq.asyncio.Context, also: KVEventsConfig
    ) -> zmq.asyncio.Socket:
        """Binds or connects as vLLM does."""
        socket, endpoint = context.socket(zmq.PUB), also.endpoint
        socket.set_hwm(also.hwm)
        binds = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(
                f"engine_args: kv_events_config: {endpoint}: {error}",
                metadata={"field": "engine_args"},
            ) from error
        return socket

    async def close(self) -> None:
        """Ends the task and closes the sockets."""
        await end_task(self._reader)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _read(self, socket: zmq.asyncio.Socket, further: zmq.asyncio.Socket | None) -> None:
        expected = 0
        while True:
            _, sequence_bytes, payload = await socket.recv_multipart()
            if further is not None and self._also is not None:
                await further.send_multipart((self._also.topic.encode(), sequence_bytes, payload))
            sequence = int.from_bytes(sequence_bytes)
            if sequence != expected:
                log.warning("%d batches of vLLM's KV events are lost", sequence - expected)
                self._prefixes.forget()
            expected = sequence + 1
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._prefixes.apply(event)
