"""Blocks that workers of one tensor-parallel size have saved are read by those of another one, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace_kv.layout.layout import KvLayout
from headrace_kv.pool.engine_blocks import BlockLookup, PoolKeys
from headrace_kv.pool.remote import BATCH_BLOCKS_MAX
from tests.memory_pool import InMemoryPool, MemoryStore
from tests.unit.kv.pool.shard_workers import LAYERS, LONG_S, SECRET, Worker, layout_of

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


def test_a_block_with_a_missing_shard_is_not_found(store: CountingStore) -> None:
    with worker_of(store, layout_of(2)) as saver:
        saver.save(*PREFIXES)
    store.remove([list(store.objects)[-1]])
    for size in (1, 2, 4):
        with worker_of(store, layout_of(size)) as reader:
            assert reader.find(*PREFIXES) == (2, 2)


def test_a_changed_byte_in_any_shard_is_refused(store: CountingStore) -> None:
    with worker_of(store, layout_of(2)) as saver:
        saver.save(*PREFIXES)
    # The second block, on the second rank.
    broken = list(store.objects)[4]
    store.change_reads(lambda key, content: b"\xff" + content[1:] if key == broken else content)
    with worker_of(store, layout_of(1)) as reader:
        found = reader.find(*PREFIXES)
        assert reader.load(PREFIXES, found) == 1
    assert broken not in store.objects


@pytest.mark.parametrize(("heads", "beginning_queries"), [(1, 1), (4, 2)])
def test_a_hit_in_own_shards_and_a_miss_take_one_query(
    store: CountingStore, heads: int, beginning_queries: int
) -> None:
    shards = min(2, heads)
    with worker_of(store, layout_of(2, heads)) as worker:
        worker.save(*PREFIXES)
        for prompt, found, queries in (
            (PREFIXES, 3, 1),
            ((91, 92), 0, 1),
            # With several heads, another worker may have saved the rest.
            ((*PREFIXES, 91), 3, beginning_queries),
        ):
            store.queries.clear()
            assert worker.find(*prompt) == (shards,) * found
            assert len(store.queries) == queries


def test_a_query_stays_small_with_many_stages_and_heads(store: CountingStore) -> None:
    layout = layout_of(2, heads=96, stage_starts=tuple(range(LAYERS)))
    keys = PoolKeys(SECRET, layout)
    prompt = range(1, BATCH_BLOCKS_MAX)
    pool = InMemoryPool(store, (), SECRET)
    store.objects.update(dict.fromkeys(keys.of_blocks(2, prompt), b""))
    found = BlockLookup(pool, keys).find(prompt, LONG_S)
    assert found is not None
    # It looks up no more than a request is worth.
    assert 0 < len(found.result(LONG_S)) <= len(prompt)
    assert max(store.queries) <= BATCH_BLOCKS_MAX
    pool.close()


def test_a_lost_store_has_no_blocks_and_is_not_asked_again(store: CountingStore) -> None:
    with worker_of(store, layout_of(1)) as worker:
        store.lose()
        assert worker.find(*PREFIXES) == ()
        assert BlockLookup(worker.pool, worker.keys).find(PREFIXES, LONG_S) is None
        assert worker.load(PREFIXES, (2, 2, 2)) == 0
