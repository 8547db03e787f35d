"""Moves the blocks of one rank from and to a remote pool, in whatever shards they were saved."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from headrace_kv.plan.saved_shards import copies_of_rank, readable_shards, shards_read
from headrace_kv.pool.keys import PoolKeys
from headrace_kv.pool.remote import RemotePool

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
