"""Blocks that a worker has saved are read by workers of the same layout, byte for byte, and by no other ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_kv.layout import KvLayout
from headrace_kv.shard_map import heads_held
from headrace_kv.tiers.copier import HostStorage
from headrace_kv.tiers.pool import (
    BATCH_BLOCKS_MAX,
    BlockLookup,
    PoolKeys,
    RankBlocks,
    leading,
    pool_secret,
)
from headrace_kv.tiers.pool_process import SEAL_BYTES
from tests.memory_pool import InMemoryPool, MemoryStore

SECRET = pool_secret(0x1234_5678_9ABC_DEF0)
LAYOUT = KvLayout.attention(
    model="m",
    dtype="float16",
    layer_count=3,
    kv_head_count=4,
    block_tokens=16,
    parts={"kv": 64},
    tensor_parallel_size=2,
)

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


def names(layout: KvLayout = LAYOUT, prefix: int = 7, secret: bytes = SECRET) -> set[str]:
    """The names of all objects of a block."""
    keys = PoolKeys(secret, layout)
    (key,) = keys.of_prefixes([prefix])
    return {place + key for place in keys.places}


def test_whatever_changes_the_bytes_of_a_block_changes_its_names() -> None:
    group = LAYOUT.groups[0]
    others = [
        names(replace(LAYOUT, model="other")),
        names(replace(LAYOUT, stage_starts=(0, 1))),
        names(replace(LAYOUT, groups=(replace(group, block_tokens=32),))),
        names(replace(LAYOUT, groups=(replace(group, head_count=8),))),
        names(replace(LAYOUT, tensor_parallel_size=1)),
        names(replace(LAYOUT, tensor_parallel_size=4)),
        names(prefix=8),
        names(prefix=2**255),
        names(secret=pool_secret(1)),
    ]
    assert len(names()) == 2
    assert len(names().union(*others)) == 2 + sum(map(len, others))
    # Without the key, a name does not show the hash.
    assert not any(f"{7:x}".zfill(16) in name for name in names())


def test_prefill_and_decode_use_the_same_names() -> None:
    # Decode workers state a width of local broadcasts.
    assert names(replace(LAYOUT, broadcast_width=2)) == names()


class Worker:
    """Its ranks' blocks in main memory, and a pool over them. Block `prefix` has bytes of its own."""

    def __init__(self, store: MemoryStore, layout: KvLayout) -> None:
        self._layout = layout
        self._storages = [
            HostStorage(layout, rank, SLOTS, pooled=True) for rank in range(layout.rank_count)
        ]
        memories = [one.pool_memory for one in self._storages if one.pool_memory is not None]
        self.pool = InMemoryPool(store, memories, SECRET)
        self.keys = PoolKeys(SECRET, layout)
        ranks = range(layout.rank_count)
        self._ranks = [RankBlocks(self.pool, self.keys, rank, rank) for rank in ranks]

    def close(self) -> None:
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
        """The bytes of a rank's block, which ranks with the same heads have too."""
        size = self._layout.tensor_parallel_size
        heads = heads_held(rank % size, size, self._layout.kv_head_count)
        random = np.random.default_rng([prefix, rank // size, heads.start])
        return random.integers(0, 256, len(self._content(self._storages[rank], 0)), np.uint8)

    def _content(self, storage: HostStorage, slot: int) -> NDArray[np.uint8]:
        memory = storage.pool_memory
        assert memory is not None
        return storage.block(slot)[: memory.object_bytes - SEAL_BYTES]


PREFIXES = (11, 12, 13)


class CountingStore(MemoryStore):
    """Records the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[int] = []

    def exist(self, keys: list[str]) -> list[int]:
        self.queries.append(len(keys))
        return super().exist(keys)


@contextmanager
def worker_of(store: MemoryStore, layout: KvLayout) -> Iterator[Worker]:
    worker = Worker(store, layout)
    yield worker
    worker.close()


@pytest.fixture
def store() -> Iterator[CountingStore]:
    store = CountingStore()
    yield store
    store.thaw()


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("stage_starts", [(0,), (0, 1)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_only_workers_of_the_same_size_and_stages_find_a_block(
    store: CountingStore, size: int, stage_starts: tuple[int, ...], heads: int
) -> None:
    layout = layout_of(size, heads, stage_starts)
    with worker_of(store, layout) as saver:
        saver.save(*PREFIXES)
    assert len(store.objects) == len(PREFIXES) * len(stage_starts) * min(size, heads)
    for other_size in (1, 2, 4):
        for other_starts in ((0,), (0, 1)):
            other = layout_of(other_size, heads, other_starts)
            with worker_of(store, other) as reader:
                whole = len(PREFIXES) if other == layout else 0
                assert reader.find(*PREFIXES) == whole
                # Also without a lookup, it reads no block of another layout.
                assert reader.load(*PREFIXES) == whole


def test_a_block_with_a_missing_shard_is_not_found(store: CountingStore) -> None:
    with worker_of(store, layout_of(2)) as saver:
        saver.save(*PREFIXES)
    store.remove([list(store.objects)[-1]])
    with worker_of(store, layout_of(2)) as reader:
        assert reader.find(*PREFIXES) == 2


def test_a_changed_byte_in_any_shard_is_refused(store: CountingStore) -> None:
    with worker_of(store, layout_of(2)) as saver:
        saver.save(*PREFIXES)
    # The second block, on the second rank.
    broken = list(store.objects)[4]
    store.change_reads(lambda key, content: b"\xff" + content[1:] if key == broken else content)
    with worker_of(store, layout_of(2)) as reader:
        assert reader.find(*PREFIXES) == len(PREFIXES)
        assert reader.load(*PREFIXES) == 1
    assert broken not in store.objects


def test_every_lookup_of_few_blocks_takes_one_query(store: CountingStore) -> None:
    with worker_of(store, layout_of(2)) as worker:
        worker.save(*PREFIXES)
        for prompt, found in ((PREFIXES, 3), ((91, 92), 0), ((*PREFIXES, 91), 3)):
            store.queries.clear()
            assert worker.find(*prompt) == found
            assert len(store.queries) == 1


def test_a_query_stays_small_with_many_stages_and_heads(store: CountingStore) -> None:
    layout = layout_of(2, heads=96, stage_starts=tuple(range(LAYERS)))
    with worker_of(store, layout) as worker:
        places, keys = worker.keys.places, worker.keys.of_prefixes(range(700))
        store.objects.update({place + key: b"" for place in places for key in keys})
        assert worker.find(*range(BATCH_BLOCKS_MAX)) == len(keys)
        assert max(store.queries) <= BATCH_BLOCKS_MAX // 2
        # No further query follows one with a missing block.
        assert sum(store.queries) < (len(keys) + 100) * len(places)


def test_a_lost_store_has_no_blocks_and_is_not_asked_again(store: CountingStore) -> None:
    with worker_of(store, layout_of(1)) as worker:
        store.lose()
        assert worker.find(*PREFIXES) == 0
        assert BlockLookup(worker.pool, worker.keys).find(PREFIXES, LONG_S) is None
        assert worker.load(*PREFIXES) == 0
