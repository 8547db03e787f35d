"""The interface of a remote pool, with a store that fails in every way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace_kv.pool.engine_blocks import pool_secret
from headrace_kv.pool.remote import RemotePool
from tests.memory_pool import InMemoryPool, MemoryStore
from tests.unit.kv.pool.memories import CONTENT_BYTES, Memory

SECRET = pool_secret(9)
LONG_S = 20.0
SHORT_S = 0.05


class Worker:
    """A worker with one rank."""

    def __init__(self, store: MemoryStore, secret: bytes = SECRET) -> None:
        self.memory = Memory()
        self.losses: list[None] = []
        self.pool = InMemoryPool(
            store, [self.memory.described], secret, lambda: self.losses.append(None)
        )

    def put(self, *pairs: tuple[str, int]) -> list[bool]:
        keys, slots = [key for key, _ in pairs], [slot for _, slot in pairs]
        return self.pool.put(0, keys, slots, LONG_S).result(LONG_S)

    def get(self, *pairs: tuple[str, int], timeout_s: float = LONG_S) -> list[bool]:
        keys, slots = [key for key, _ in pairs], [slot for _, slot in pairs]
        return self.pool.get(0, keys, slots, timeout_s).result(LONG_S)

    def exists(self, *keys: str, timeout_s: float = LONG_S) -> list[bool]:
        return self.pool.exists(keys, timeout_s).result(LONG_S)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.thaw()


def filled(store: MemoryStore) -> Worker:
    """A worker that has stored blocks a, b and c."""
    worker = Worker(store)
    for slot, _ in enumerate("abc"):
        worker.memory.fill(slot, 10 + slot)
    assert worker.put(("a", 0), ("b", 1), ("c", 2)) == [True, True, True]
    return worker


def test_another_worker_reads_what_one_has_stored(store: MemoryStore) -> None:
    filled(store)
    other = Worker(store)
    assert other.exists("a", "x", "c") == [True, False, True]
    assert other.get(("a", 5), ("b", 3)) == [True, True]
    assert other.memory.value(5) == 10
    assert other.memory.value(3) == 11
    assert isinstance(other.pool, RemotePool)


def test_a_block_is_stored_once(store: MemoryStore) -> None:
    filled(store)
    other = Worker(store)
    other.memory.fill(0, 99)
    assert other.put(("a", 0)) == [True]
    assert other.get(("a", 1)) == [True]
    assert other.memory.value(1) == 10


def test_blocks_behind_a_missing_one_are_not_read(store: MemoryStore) -> None:
    filled(store)
    store.remove(["b"])
    assert Worker(store).get(("a", 0), ("b", 1), ("c", 2))[:2] == [True, False]


def test_a_part_of_a_block_is_refused(store: MemoryStore) -> None:
    filled(store)
    store.change_reads(lambda _, content: content[: CONTENT_BYTES // 2])
    assert Worker(store).get(("a", 0)) == [False]


def test_a_block_of_another_name_or_deployment_is_refused(store: MemoryStore) -> None:
    filled(store)
    store.objects["b"] = store.objects["a"]
    assert Worker(store).get(("b", 0)) == [False]
    assert Worker(store, pool_secret(10)).get(("a", 0)) == [False]


def test_a_frozen_store_ends_a_call_in_time_and_closes_the_pool(store: MemoryStore) -> None:
    worker = filled(store)
    store.freeze()
    assert worker.get(("a", 4), timeout_s=SHORT_S) == [False]
    assert worker.losses == [None]
    assert not worker.pool.is_open
    # Further calls do not wait at all.
    future = worker.pool.exists(["a", "b"], LONG_S)
    assert future.done()
    assert future.result() == [False, False]


def test_a_closed_pool_refuses_calls(store: MemoryStore) -> None:
    worker = filled(store)
    worker.pool.close()
    assert worker.get(("a", 0)) == [False]
    assert worker.losses == []
