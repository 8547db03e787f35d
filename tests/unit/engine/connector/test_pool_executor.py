"""Moves of one rank's blocks from and to a remote pool."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain

import pytest

from headrace_engine.connector.step_plan import PoolMove
from headrace_engine.connector.tier_executor import PoolExecutor
from headrace_kv.tiers.pool import PoolKeys, RemotePool
from tests.unit.kv.tiers.test_pool import LAYOUT, SECRET

KEYS = PoolKeys(SECRET, LAYOUT)


class Pool(RemotePool):
    """Ends calls when the test does."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], list[int], Future[list[bool]]]] = []
        self.timeouts: list[float] = []
        self.opened = True

    @property
    def is_open(self) -> bool:
        return self.opened

    def exists(
        self, keys: Sequence[str], timeout_s: float, places: Sequence[str] = ("",)
    ) -> Future[list[bool]]:
        return self._call("exists", keys, (), timeout_s)

    def get(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        return self._call("get", keys, slots, timeout_s)

    def put(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        return self._call("put", keys, slots, timeout_s)

    def close(self) -> None:
        self.opened = False

    def _call(
        self, name: str, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        future: Future[list[bool]] = Future()
        self.timeouts.append(timeout_s)
        self.calls.append((name, list(keys), list(slots), future))
        return future


def test_moves_end_with_the_number_of_whole_blocks() -> None:
    pool, executor = Pool(), PoolExecutor(1)
    executor.attach(pool, KEYS)
    executor.begin(PoolMove(7, True, (1, 2, 3), (4, 5, 6), 3.0))
    executor.begin(PoolMove(8, False, (1,), (4,), 9.0))
    assert executor.take_ended() == []
    (get, keys, slots, read), (put, _, _, written) = pool.calls
    assert (get, put) == ("get", "put")
    assert (keys, slots) == (KEYS.of_shard(0, 1, [1, 2, 3]), [4, 5, 6])
    assert pool.timeouts == [3.0, 9.0]
    read.set_result([True, False, True])
    written.set_result([True])
    assert executor.take_ended() == [(7, 1), (8, 1)]
    executor.close()
    assert not pool.is_open


@pytest.mark.parametrize("prefixes", [(1, 2, 3, 4, 6), (1, 3), (2,)])
def test_ranks_with_the_same_heads_store_each_block_once(prefixes: tuple[int, ...]) -> None:
    # Two ranks for each of four heads.
    pool, keys = Pool(), PoolKeys(SECRET, replace(LAYOUT, tensor_parallel_size=8))
    executors = [PoolExecutor(rank) for rank in range(8)]
    slots = tuple(range(len(prefixes)))
    for executor in executors:
        executor.attach(pool, keys)
        executor.begin(PoolMove(7, False, prefixes, slots, 3.0))
    stored = [
        (name, slot)
        for _, names, places, _ in pool.calls
        for name, slot in zip(names, places, strict=True)
    ]
    expected = [keys.of_shard(0, shard, prefixes) for shard in range(len(keys.shards))]
    assert sorted(stored) == sorted(zip(chain(*expected), 4 * slots, strict=True))
    for _, names, _, future in pool.calls:
        future.set_result([True] * len(names))
    assert all(executor.take_ended() == [(7, len(prefixes))] for executor in executors)


def test_without_a_pool_moves_end_at_once() -> None:
    executor = PoolExecutor(0)
    executor.begin(PoolMove(7, True, (1,), (4,), 3.0))
    assert executor.take_ended() == [(7, 0)]
    executor.close()
