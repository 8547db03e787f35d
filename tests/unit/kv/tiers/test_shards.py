"""Blocks that a worker has saved are read by workers of the same layout, byte for byte, and by no other ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace_kv.layout import KvLayout
from headrace_kv.tiers.pool import BATCH_BLOCKS_MAX, BlockLookup, PoolKeys
from tests.memory_pool import InMemoryPool, MemoryStore
from tests.unit.kv.tiers.shard_workers import LAYERS, LONG_S, SECRET, Worker, layout_of

PREFIXES = (11, 12, 13)


class CountingStore(MemoryStore):
    """Records the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[int] = []

    def exist(self, keys: list[str]) -> list[int]:
        self.queries.append(len(keys))
        return super().exist(keys)


def worker_of(store: MemoryStore, layout: KvLayout) -> Worker:
    return Worker(lambda memories: InMemoryPool(store, memories, SECRET), layout)


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
    keys = PoolKeys(SECRET, layout)
    prompt = range(1, BATCH_BLOCKS_MAX)
    pool = InMemoryPool(store, (), SECRET)
    store.objects.update(dict.fromkeys(keys.of_blocks(prompt), b""))
    found = BlockLookup(pool, keys).find(prompt, LONG_S)
    assert found is not None
    # It looks up no more than a request is worth.
    assert BATCH_BLOCKS_MAX // 6 < found.result(LONG_S) <= len(prompt)
    assert max(store.queries) <= BATCH_BLOCKS_MAX
    pool.close()


def test_a_lost_store_has_no_blocks_and_is_not_asked_again(store: CountingStore) -> None:
    with worker_of(store, layout_of(1)) as worker:
        store.lose()
        assert worker.find(*PREFIXES) == 0
        assert BlockLookup(worker.pool, worker.keys).find(PREFIXES, LONG_S) is None
        assert worker.load(*PREFIXES) == 0
