"""The interface of a remote pool: blocks by key, in a store that other workers read and write too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from headrace_kv.plan.block_copy import StridedCopy

BATCH_BLOCKS_MAX: Final = 1_024
"""Most blocks of one call."""


OWN_SHARD: Final = 0
"""The shard of a block that a rank stores, and reads straight into its slots."""


@dataclass(frozen=True, slots=True)
class ShardSource:
    """Blocks of another shard: their size in the store, and what a rank copies out of one into a slot."""

    object_bytes: int
    copies: tuple[StridedCopy, ...]


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """One rank's slots for blocks, in shared memory. Slot i starts at i * `slot_bytes`.

    The first `object_bytes` of a slot are stored. The last SEAL_BYTES of these belong to the pool. `others`: further
    shards that the rank reads. Shard i is the i-th of them, from 1 on.
    """

    descriptor: int
    slot_bytes: int
    slot_count: int
    object_bytes: int
    others: tuple[ShardSource, ...] = ()


class RemotePool(ABC):
    """Blocks by key. The calls return at once, from any thread, and never raise.

    A future ends within its call's `timeout_s`. Its list has one value for each key: whether the block is there, or was
    moved whole. A store that is lost, frozen or wrong gives False, never an error. When a future has ended, the pool
    neither reads nor writes the call's slots any more. So blocks are lost with the store, and answers are not.
    """

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the store can be asked at present. While it is False, every future ends at once, with False."""

    @abstractmethod
    def exists(self, keys: Sequence[str], timeout_s: float) -> Future[list[bool]]:
        """Whether the store has blocks. They may be gone by the time of `get`."""

    @abstractmethod
    def get(
        self,
        memory: int,
        keys: Sequence[str],
        slots: Sequence[int],
        timeout_s: float,
        shard: int = OWN_SHARD,
    ) -> Future[list[bool]]:
        """Reads blocks into slots of a memory. True for those with the bytes that were stored for exactly that key.

        Of another shard than OWN_SHARD, it writes those bytes of the slots that this shard has.
        """

    @abstractmethod
    def put(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Stores blocks. True also for those that the store has already."""

    @abstractmethod
    def close(self) -> None:
        """Ends all calls. Returns when no slot is in use any more."""


def leading(values: Sequence[bool]) -> int:
    """How many values before the first False."""
    return next((position for position, value in enumerate(values) if not value), len(values))


def refused(count: int) -> Future[list[bool]]:
    """The ended future of a call without success."""
    future: Future[list[bool]] = Future()
    future.set_result([False] * count)
    return future
