"""The blocks of an engine in a pool: their keys, the scheduler's lookup, and the copies of each rank.

A block has an object for each shard of its heads in each pipeline stage. An object's name has the layout, the stage,
the heads, and a keyed hash of the block. The block's own hash covers its tokens, all tokens before it, and the tenant's
cache salt. So blocks of another model, layout or tenant have other names, and so have those of workers of another
tensor-parallel size. Without the deployment's key, a name does not show whether a prompt is in the pool.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Final

from headrace_kv.layout import KvLayout, layout_to_proto
from headrace_kv.pool.remote import BATCH_BLOCKS_MAX, RemotePool, leading
from headrace_kv.shard_map import Shard, shards

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
        # Local broadcast changes no byte of a block.
        message = layout_to_proto(replace(layout, broadcast_width=1))
        digest = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
        self._layout = digest[:_LAYOUT_CHARACTERS]
        self._secret = secret
        self.layout = layout
        """The layout of the worker that uses the names."""
        self.shards = shards(layout.tensor_parallel_size, layout.kv_head_count)
        """The shards of each stage."""
        self.objects_per_block = len(layout.stage_starts) * len(self.shards)

    def of_shard(self, stage: int, shard: Shard, prefixes: Sequence[int]) -> list[str]:
        """The names of one shard of blocks, by their hashes of at most 256 bits."""
        return self._join(stage, shard, self._digests(prefixes))

    def of_blocks(self, prefixes: Sequence[int]) -> list[str]:
        """The names of all objects of blocks, shard by shard."""
        digests = self._digests(prefixes)
        return [
            name
            for stage in range(len(self.layout.stage_starts))
            for shard in self.shards
            for name in self._join(stage, shard, digests)
        ]

    def _join(self, stage: int, shard: Shard, digests: list[str]) -> list[str]:
        place = f"{stage}.{shard.heads.start}.{shard.heads.stop}"
        return [f"headrace{_VERSION}-{self._layout}-{place}-{digest}" for digest in digests]

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

    def find(self, prefixes: Sequence[int], timeout_s: float) -> Future[int] | None:
        """How many first blocks every rank can fetch, which ends in time. None while the store cannot be asked."""
        if not self._pool.is_open or not prefixes:
            return None
        search = _Search(self._pool, self._keys, prefixes, time.monotonic() + timeout_s)
        search.ask()
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
        self._queries = 0
        self._count = 0
        self.found: Future[int] = Future()

    def ask(self) -> None:
        """Asks for as many further blocks as a query holds."""
        left_s = self._due_s - time.monotonic()
        rest = self._prefixes[self._count :]
        if not rest or self._queries >= _QUERIES_MAX or left_s <= 0:
            self.found.set_result(self._count)
            return
        self._queries += 1
        asked = rest[: max(1, BATCH_BLOCKS_MAX // self._keys.objects_per_block)]
        answer = self._pool.exists(self._keys.of_blocks(asked), left_s)
        answer.add_done_callback(partial(self._answered, len(asked)))

    def _answered(self, asked: int, answer: Future[list[bool]]) -> None:
        present = answer.result()
        whole = min(
            leading(present[start : start + asked]) for start in range(0, len(present), asked)
        )
        self._count += whole
        if whole == asked:
            self.ask()
        else:
            self.found.set_result(self._count)


class RankBlocks:
    """Any thread may call it. `memory` is the number of the rank's memory in the pool."""

    def __init__(self, pool: RemotePool, keys: PoolKeys, rank: int, memory: int) -> None:
        self._pool = pool
        self._keys = keys
        self._memory = memory
        self._stage, rank_in_stage = divmod(rank, keys.layout.tensor_parallel_size)
        self._shard = next(one for one in reversed(keys.shards) if one.first_rank <= rank_in_stage)
        self._copy = rank_in_stage - self._shard.first_rank

    def fetch(
        self, prefixes: Sequence[int], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Reads blocks into slots. True for those that are whole."""
        names = self._keys.of_shard(self._stage, self._shard, prefixes)
        return self._pool.get(self._memory, names, slots, timeout_s)

    def store(
        self, prefixes: Sequence[int], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Stores blocks. Of the ranks with the same heads, one stores each block. The others have True at once."""
        done = [prefix % self._shard.copies != self._copy for prefix in prefixes]
        chosen = [index for index, is_done in enumerate(done) if not is_done]
        stored: Future[list[bool]] = Future()
        if not chosen:
            stored.set_result(done)
            return stored
        names = self._keys.of_shard(self._stage, self._shard, [prefixes[i] for i in chosen])

        def end(moved: Future[list[bool]]) -> None:
            for index, whole in zip(chosen, moved.result(), strict=True):
                done[index] = whole
            stored.set_result(done)

        moved = self._pool.put(self._memory, names, [slots[i] for i in chosen], timeout_s)
        moved.add_done_callback(end)
        return stored
