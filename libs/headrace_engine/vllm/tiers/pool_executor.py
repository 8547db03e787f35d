"""Moves a rank's blocks between main memory and a remote pool. Uses no vLLM types."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from headrace_engine.vllm.step.plan import PoolMove
from headrace_engine.vllm.tiers.pool_lookup import leading
from headrace_kv.manager.load_times import TierLoad
from headrace_kv.pool.base import RemotePool
from headrace_kv.pool.keys import PoolKeys
from headrace_kv.prefix.events import Tier


class PoolExecutor:
    """The thread of the tiers begins moves, and the rank's compute thread takes their ends.

    The pool's thread calls `on_load` after each fetch that has brought blocks.
    """

    def __init__(self, rank: int, on_load: Callable[[TierLoad], None]) -> None:
        self._rank = rank
        self._on_load = on_load
        self._opened: tuple[RemotePool, PoolKeys] | None = None
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def attach(self, pool: RemotePool, keys: PoolKeys) -> None:
        """Uses a pool from now on. Without one, moves end at once."""
        self._opened = (pool, keys)

    def begin(self, move: PoolMove) -> None:
        """Begins a move. The copies before it are made."""
        if self._opened is None:
            self._ended.put((move.number, 0))
            return
        pool, keys = self._opened
        names = keys.of_rank(self._rank, move.prefixes)
        call = pool.get if move.fetches else pool.put
        moved = call(0, names, move.block_ids, move.timeout_s)
        moved.add_done_callback(partial(self._end, move, time.monotonic()))

    def take_ended(self) -> list[tuple[int, int]]:
        """Moves that have ended since the last call: (number, blocks that were moved whole, from the first on)."""
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        """Leaves the pool."""
        if self._opened is not None:
            self._opened[0].close()

    def _end(self, move: PoolMove, start_s: float, moved: Future[list[bool]]) -> None:
        whole = leading(moved.result())
        if move.fetches and whole:
            self._on_load(TierLoad(Tier.REMOTE, whole, time.monotonic() - start_s))
        self._ended.put((move.number, whole))
