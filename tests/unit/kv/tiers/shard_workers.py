"""Workers that share blocks of one model, with bytes that differ by place."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from headrace_kv.layout import KvLayout
from headrace_kv.shard_map import heads_held
from headrace_kv.tiers.copier import HostStorage
from headrace_kv.tiers.pool import (
    BlockLookup,
    PoolKeys,
    RankBlocks,
    RemotePool,
    leading,
    pool_secret,
)
from headrace_kv.tiers.pool_process import PoolMemory

SECRET = pool_secret(9)
LONG_S = 20.0
SLOTS = 8
LAYERS = 3
TOKENS = 2
PARTS = {"k": 3, "v": 2}


def layout_of(size: int, heads: int = 4, stage_starts: tuple[int, ...] = (0,)) -> KvLayout:
    """A small model on `size` ranks of each stage."""
    return KvLayout.attention(
        model="m",
        dtype="uint8",
        layer_count=LAYERS,
        kv_head_count=heads,
        block_tokens=TOKENS,
        parts=PARTS,
        tensor_parallel_size=size,
        stage_starts=stage_starts,
    )


class Worker:
    """Its ranks' blocks in main memory, and a pool over them. Block `prefix` has bytes of its own."""

    def __init__(
        self, open_pool: Callable[[list[PoolMemory]], RemotePool], layout: KvLayout
    ) -> None:
        self._layout = layout
        self._storages = [
            HostStorage(layout, rank, SLOTS, pooled=True) for rank in range(layout.rank_count)
        ]
        memories = [one.pool_memory for one in self._storages if one.pool_memory is not None]
        self.pool = open_pool(memories)
        self.keys = PoolKeys(SECRET, layout)
        ranks = range(layout.rank_count)
        self._ranks = [RankBlocks(self.pool, self.keys, rank, rank) for rank in ranks]

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.pool.close()
        for storage in self._storages:
            storage.close()

    def save(self, *prefixes: int) -> None:
        """Stores blocks, on all ranks."""
        for rank, storage in enumerate(self._storages):
            for slot, prefix in enumerate(prefixes):
                self._content(storage, slot)[:] = self.expected(rank, prefix)
        slots = list(range(len(prefixes)))
        for calls in [rank.store(prefixes, slots, LONG_S) for rank in self._ranks]:
            assert calls.result(LONG_S) == [True] * len(prefixes)

    def find(self, *prefixes: int) -> int:
        """How many first blocks the pool has."""
        found = BlockLookup(self.pool, self.keys).find(prefixes, LONG_S)
        assert found is not None
        return found.result(LONG_S)

    def load(self, *prefixes: int) -> int:
        """Fetches blocks on all ranks. Returns how many first ones are whole, which have the right bytes."""
        slots = list(reversed(range(len(prefixes))))
        reads = [rank.fetch(prefixes, slots, LONG_S) for rank in self._ranks]
        whole = min(leading(read.result(LONG_S)) for read in reads)
        for rank, storage in enumerate(self._storages):
            for slot, prefix in list(zip(slots, prefixes, strict=True))[:whole]:
                assert self._content(storage, slot).tolist() == self.expected(rank, prefix).tolist()
        return whole

    def expected(self, rank: int, prefix: int) -> NDArray[np.uint8]:
        """The bytes of a rank's block: each shows its block, layer, part, head, token and place."""
        size = self._layout.tensor_parallel_size
        heads = heads_held(rank % size, size, self._layout.kv_head_count)
        values = [
            hash((prefix, layer, part, head, token, byte)) % 251
            for layer in self._layout.layers_of(rank)
            for part, (_, unit_bytes) in enumerate(PARTS.items())
            for head in heads
            for token in range(TOKENS)
            for byte in range(unit_bytes)
        ]
        return np.array(values, np.uint8)

    def _content(self, storage: HostStorage, slot: int) -> NDArray[np.uint8]:
        nbytes = len(self.expected(storage.memory.rank, 0))
        return storage.block(slot)[:nbytes]
