"""The blocks of an engine in a pool: their keys, the scheduler's lookup, and the copies of each rank.

A block has an object for each shard of its heads in each pipeline stage. An object's name has the layout, the stage,
the heads, and a keyed hash of the block. The block's own hash covers its tokens, all tokens before it, and the tenant's
cache salt. So blocks of another model, layout or tenant have other names. Workers of another tensor-parallel size have
the same names for the same heads. Without the deployment's key, a name does not show whether a prompt is in the pool.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

from headrace_kv.layout.layout import KvLayout
from headrace_kv.layout.proto import layout_to_proto
from headrace_kv.plan.saved_shards import (
    copies_of_rank,
    readable_shards,
    saved_shards,
    shard_counts,
    shards_read,
)
from headrace_kv.pool.remote import BATCH_BLOCKS_MAX, RemotePool, leading

_VERSION: Final = 2
"""Of the names, of the order of bytes in a block, and of the seal."""
_LAYOUT_CHARACTERS: Final = 16
_BLOCK_BYTES: Final = 16
_PREFIX_BYTES: Final = 32
# BLAKE2's personalization: no two digests of the deployment's key are equal.
_NAMES: Final = b"poolname"


def pool_secret(prefix_hash_key: int) -> bytes:
    """The key of names and seals, from the deployment's key."""
    return prefix_hash_key.to_bytes(8, "little")


class PoolKeys:
    """The names of the blocks of one layout."""

    def __init__(self, secret: bytes, layout: KvLayout) -> None:
        # Neither the tensor-parallel size nor local broadcast changes a byte of a head.
        message = layout_to_proto(replace(layout, tensor_parallel_size=1, broadcast_width=1))
        digest = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
        self._layout = digest[:_LAYOUT_CHARACTERS]
        self._secret = secret
        self.layout = layout
        """The layout of the worker that uses the names."""

    def of_shard(self, stage: int, heads: range, prefixes: Sequence[int]) -> list[str]:
        """The names of one shard of blocks, by their hashes of at most 256 bits."""
        return self._join(stage, heads, self._digests(prefixes))

    def of_blocks(self, shard_count: int, prefixes: Sequence[int]) -> list[str]:
        """The names of all objects of blocks that were saved in `shard_count` shards, shard by shard."""
        digests = self._digests(prefixes)
        return [
            name
            for stage in range(len(self.layout.stage_starts))
            for heads in saved_shards(self.layout.kv_head_count, shard_count)
            for name in self._join(stage, heads, digests)
        ]

    def objects_of(self, shard_count: int) -> int:
        """The number of objects of one block."""
        return len(self.layout.stage_starts) * shard_count

    def _join(self, stage: int, heads: range, digests: list[str]) -> list[str]:
        shard = f"headrace{_VERSION}-{self._layout}-{stage}.{heads.start}.{heads.stop}"
        return [f"{shard}-{digest}" for digest in digests]

    def _digests(self, prefixes: Sequence[int]) -> list[str]:
        return [
            hashlib.blake2s(
                prefix.to_bytes(_PREFIX_BYTES, "big"),
                digest_size=_BLOCK_BYTES,
                key=self._secret,
                person=_NAMES,
            ).hexdigest()
            for prefix in prefixes
        ]


_QUERIES_MAX: Final = 6


class BlockLookup:
    """Looks up blocks on all ranks of a worker, which may be far from here."""

    def __init__(self, pool: RemotePool, keys: PoolKeys) -> None:
        self._pool = pool
        self._keys = keys
        self.own_shard_count = shard_counts(keys.layout)[0]
        """In how many shards the worker saves a block."""

    def find(self, prefixes: Sequence[int], timeout_s: float) -> Future[tuple[int, ...]] | None:
        """The shard counts of the first blocks that every rank can fetch, which ends in time.

        None while the store cannot be asked. Blocks that were saved in the worker's own shards take one query.
        """
        if not self._pool.is_open or not prefixes:
            return None
        search = _Search(self._pool, self._keys, prefixes, time.monotonic() + timeout_s)
        search.begin()
        return search.found


class _Search:
    """One lookup. Its queries follow each other, on the threads that end them."""

    def __init__(
        self, pool: RemotePool, keys: PoolKeys, prefixes: Sequence[int], due_s: float
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._prefixes = prefixes
        self._due_s = due_s
        self._known = _asked_counts(keys)
        self._queries = 0
        self._counts: list[int] = []
        self.found: Future[tuple[int, ...]] = Future()

    def begin(self) -> None:
        """Asks for all blocks in the worker's own shards, and for the first block in all others."""
        own, *others = self._known
        self._ask(own, others)

    def _ask(self, shard_count: int, probed: Sequence[int] = ()) -> None:
        """Asks for all further blocks in `shard_count` shards, and for the next one in each count of `probed`."""
        rest = self._prefixes[len(self._counts) :]
        room = BATCH_BLOCKS_MAX - sum(map(self._keys.objects_of, probed))
        asked = rest[: max(1, room // self._keys.objects_of(shard_count))]
        names = self._keys.of_blocks(shard_count, asked)
        self._query(
            names + self._probe_names(probed),
            partial(self._answered, shard_count, len(asked), probed),
        )

    def _probe(self, probed: Sequence[int]) -> None:
        """Asks for the next block in each count of `probed`."""
        if not probed:
            self._end()
            return
        self._query(self._probe_names(probed), partial(self._probes_answered, probed))

    def _answered(
        self, shard_count: int, asked: int, probed: Sequence[int], present: list[bool]
    ) -> None:
        end = asked * self._keys.objects_of(shard_count)
        whole = min(leading(present[start : start + asked]) for start in range(0, end, asked))
        self._counts += [shard_count] * whole
        if len(self._counts) == len(self._prefixes):
            self._end()
        elif whole == asked:
            self._ask(shard_count)
        elif whole:
            # Another worker may have saved the next block.
            self._probe([count for count in self._known if count != shard_count])
        else:
            self._probes_answered(probed, present[end:])

    def _probes_answered(self, probed: Sequence[int], present: list[bool]) -> None:
        start = 0
        for count in probed:
            end = start + self._keys.objects_of(count)
            if all(present[start:end]):
                self._ask(count)
                return
            start = end
        self._end()

    def _probe_names(self, probed: Sequence[int]) -> list[str]:
        block = self._prefixes[len(self._counts) :][:1]
        return [name for count in probed for name in self._keys.of_blocks(count, block)]

    def _query(self, names: list[str], then: Callable[[list[bool]], None]) -> None:
        left_s = self._due_s - time.monotonic()
        if self._queries >= _QUERIES_MAX or left_s <= 0:
            self._end()
            return
        self._queries += 1
        answer = self._pool.exists(names, left_s)
        answer.add_done_callback(lambda asked: then(asked.result()))

    def _end(self) -> None:
        self.found.set_result(tuple(self._counts))


def _asked_counts(keys: PoolKeys) -> list[int]:
    """The shard counts of the layout, its own first, as far as half a query holds a block of each."""
    own, *others = shard_counts(keys.layout)
    found = [own]
    for count in others:
        if sum(map(keys.objects_of, (*found, count))) <= BATCH_BLOCKS_MAX // 2:
            found.append(count)
    return found


_Call: TypeAlias = tuple[list[int], Future[list[bool]]]
"""The indices of the blocks of a call, and its end."""


class RankBlocks:
    """Any thread may call it. `memory` is the number of the rank's memory in the pool."""

    def __init__(self, pool: RemotePool, keys: PoolKeys, rank: int, memory: int) -> None:
        self._pool = pool
        self._keys = keys
        self._memory = memory
        layout = keys.layout
        self._layout, self._rank = layout, rank
        self._stage = rank // layout.tensor_parallel_size
        self._shards = readable_shards(layout, rank)
        self._copy, self._copies = copies_of_rank(layout, rank)

    def fetch(
        self,
        prefixes: Sequence[int],
        slots: Sequence[int],
        shard_counts: Sequence[int],
        timeout_s: float,
    ) -> Future[list[bool]]:
        """Reads blocks into slots. `shard_counts`: in how many shards each was saved. True for those that are whole."""
        calls: list[_Call] = []
        for count in dict.fromkeys(shard_counts):
            chosen = [index for index, one in enumerate(shard_counts) if one == count]
            wanted = [prefixes[index] for index in chosen]
            places = [slots[index] for index in chosen]
            for heads in shards_read(self._layout, self._rank, count):
                names = self._keys.of_shard(self._stage, heads, wanted)
                shard = self._shards.index(heads)
                moved = self._pool.get(self._memory, names, places, timeout_s, shard)
                calls.append((chosen, moved))
        return _join(len(prefixes), calls)

    def store(
        self, prefixes: Sequence[int], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Stores blocks. Of the ranks with the same heads, one stores each block. The others have True at once."""
        chosen = [
            index for index, prefix in enumerate(prefixes) if prefix % self._copies == self._copy
        ]
        if not chosen:
            return _join(len(prefixes), ())
        names = self._keys.of_shard(self._stage, self._shards[0], [prefixes[i] for i in chosen])
        places = [slots[index] for index in chosen]
        moved = self._pool.put(self._memory, names, places, timeout_s)
        return _join(len(prefixes), [(chosen, moved)])


@dataclass(slots=True)
class _Joined:
    """Calls for some of the same blocks. A block is moved when every call for it has moved it."""

    done: list[bool]
    missing: int
    future: Future[list[bool]] = field(default_factory=Future)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def call_ended(self, indices: Sequence[int], moved: Future[list[bool]]) -> None:
        """A call for the blocks at `indices` has ended."""
        with self.lock:
            for index, whole in zip(indices, moved.result(), strict=True):
                self.done[index] = self.done[index] and whole
            self.missing -= 1
            is_last = not self.missing
        if is_last:
            self.future.set_result(self.done)


def _join(block_count: int, calls: Sequence[_Call]) -> Future[list[bool]]:
    """Ends when all calls have ended. Blocks without a call count as moved."""
    joined = _Joined([True] * block_count, len(calls))
    if not calls:
        joined.future.set_result(joined.done)
    for indices, moved in calls:
        moved.add_done_callback(partial(joined.call_ended, indices))
    return joined.future
