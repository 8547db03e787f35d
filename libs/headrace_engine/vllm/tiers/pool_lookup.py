"""Asks a remote pool which blocks it has, for the scheduler of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from headrace_kv.pool.base import BATCH_BLOCKS_MAX, RemotePool
from headrace_kv.pool.keys import PoolKeys


class StoreLookup:
    """Looks up blocks on all ranks of `rank_count`, which may be far from here."""

    def __init__(self, pool: RemotePool, keys: PoolKeys, timeout_s: float) -> None:
        self._pool = pool
        self._keys = keys
        self._timeout_s = timeout_s

    def find(self, prefixes: Sequence[int]) -> Future[int] | None:
        """See PoolLookup."""
        if not self._pool.is_open:
            return None
        wanted = prefixes[: BATCH_BLOCKS_MAX // self._keys.rank_count]
        found: Future[int] = Future()
        asked = self._pool.exists(self._keys.of_all_ranks(wanted), self._timeout_s)
        asked.add_done_callback(partial(_end, found, len(wanted)))
        return found


def _end(found: Future[int], count: int, asked: Future[list[bool]]) -> None:
    """Ends `found` with the number of first blocks that every rank has."""
    present = asked.result()
    by_rank = [present[start : start + count] for start in range(0, len(present), count)]
    found.set_result(min(leading(rank) for rank in by_rank))


def leading(values: Sequence[bool]) -> int:
    """How many values before the first False."""
    return next((position for position, value in enumerate(values) if not value), len(values))
