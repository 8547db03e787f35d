"""Asks a remote pool which blocks it has, and in how many shards each was saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from headrace_kv.plan.saved_shards import shard_counts
from headrace_kv.pool.keys import PoolKeys
from headrace_kv.pool.remote import BATCH_BLOCKS_MAX, RemotePool, leading

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
