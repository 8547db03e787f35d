"""Moves a rank's blocks between main memory and a remote pool. Uses no vLLM types."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from functools import partial
from typing import Final

from headrace_engine.vllm.step.plan import PoolMove
from headrace_kv.pool.engine_blocks import PoolKeys, RankBlocks
from headrace_kv.pool.remote import RemotePool, leading

_MEMORY: Final = 0
"""A rank opens the pool over its own memory alone."""


class PoolExecutor:
    """The thread of the tiers begins moves, and the rank's compute thread takes their ends."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._opened: tuple[RemotePool, RankBlocks] | None = None
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def attach(self, pool: RemotePool, keys: PoolKeys) -> None:
        """Uses a pool from now on. Without one, moves end at once."""
        self._opened = (pool, RankBlocks(pool, keys, self._rank, _MEMORY))

    def begin(self, move: PoolMove) -> None:
        """Begins a move. The copies before it are made."""
        if self._opened is None:
            self.refuse(move)
            return
        _, blocks = self._opened
        moved = (
            blocks.fetch(move.prefixes, move.block_ids, move.shard_counts, move.timeout_s)
            if move.fetches
            else blocks.store(move.prefixes, move.block_ids, move.timeout_s)
        )
        moved.add_done_callback(partial(self._end, move.number))

    def refuse(self, move: PoolMove) -> None:
        """Ends a move that was not begun."""
        self._ended.put((move.number, 0))

    def take_ended(self) -> list[tuple[int, int]]:
        """Moves that have ended since the last call: (number, blocks that were moved whole, from the first on)."""
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        """Leaves the pool."""
        if self._opened is not None:
            self._opened[0].close()

    def _end(self, number: int, moved: Future[list[bool]]) -> None:
        self._ended.put((number, leading(moved.result())))
