"""Moves sealed blocks between slots of memory and a store. Blocks the calling thread; bounded by its process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from headrace_common.errors import TransferFailed
from headrace_kv.pool.base import OWN_SHARD
from headrace_kv.pool.seal import is_sealed, seal_of
from headrace_kv.pool.shard_memory import STEP_BYTES, ShardMemory, copy_heads
from headrace_kv.pool.slots import Slots

STORED: Final = 0
ABSENT: Final = -704
PRESENT: Final = -705
"""Status codes, which are those of Mooncake Store."""
_LOST: Final = range(-999, -799)
"""Transfers and calls that failed: the store itself is lost, not a block."""
_STEP_BLOCKS: Final = 64


class BlockStore(Protocol):
    """A shared store of bytes by key. It reads and writes memory by address, which was registered before."""

    def register(self, memories: Sequence[Slots]) -> None:
        """Lets calls use this memory. Raises TransferFailed."""

    def exist(self, keys: list[str]) -> list[int]:
        """1 for a key that is there, 0 for one that is not, else a status code."""

    def get(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        """Reads objects of at most `nbytes` each. Returns their sizes, or a status code."""

    def put(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        """Stores objects. Returns STORED or a status code."""

    def remove(self, keys: list[str]) -> None:
        """Removes objects, if they are there."""


class BlockClient:
    """Seals what it stores, and checks what it reads. One thread reads; others may store from other slots meanwhile.

    Every call raises TransferFailed when the store is lost.
    """

    def __init__(self, store: BlockStore, memories: Sequence[Slots], secret: bytes) -> None:
        self._store = store
        self._memories = memories
        self._secret = secret
        self._shard_memory: ShardMemory | None = None

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether the store has each key."""
        found: list[int] = []
        for start in range(0, len(keys), _STEP_BLOCKS * 8):
            found += self._store.exist(list(keys[start : start + _STEP_BLOCKS * 8]))
        if any(code < 0 for code in found):
            raise TransferFailed(f"the store cannot be asked (code {min(found)})")
        return [code == 1 for code in found]

    def get(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], shard: int = OWN_SHARD
    ) -> list[bool]:
        """Reads blocks. Blocks after the first one that is missing are not read: a prefix needs all before it."""
        target = self._memories[memory]
        source = target if shard == OWN_SHARD else self._memory_of(target, shard)
        read: list[bool] = []
        for part, places in self._steps(source, keys, slots):
            landed = places if shard == OWN_SHARD else list(range(len(part)))
            whole = self._read(source, part, landed)
            if shard != OWN_SHARD:
                copies = target.others[shard - 1].copies
                for slot, place, good in zip(landed, places, whole, strict=True):
                    if good:
                        copy_heads(source.object_at(slot), target.object_at(place), copies)
            read += whole
            if not all(whole):
                break
        return read + [False] * (len(keys) - len(read))

    def put(self, memory: int, keys: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Stores the blocks that the store lacks."""
        source = self._memories[memory]
        known = self.exists(keys)
        missing = [
            (key, slot)
            for key, slot, is_known in zip(keys, slots, known, strict=True)
            if not is_known
        ]
        stored: set[str] = set()
        wanted, places = [key for key, _ in missing], [slot for _, slot in missing]
        for part, chosen in self._steps(source, wanted, places):
            for key, slot in zip(part, chosen, strict=True):
                source.seal_of(slot)[:] = seal_of(self._secret, key, source.content_of(slot))
            codes = self._call(self._store.put, source, part, chosen)
            stored.update(
                key for key, code in zip(part, codes, strict=True) if code in (STORED, PRESENT)
            )
        return [is_known or key in stored for key, is_known in zip(keys, known, strict=True)]

    def _read(self, memory: Slots, keys: list[str], slots: list[int]) -> list[bool]:
        """Whether each slot has its block. Removes objects that are not what was stored."""
        codes = self._call(self._store.get, memory, keys, slots)
        whole = [
            code == memory.object_bytes and self._has_seal(memory, key, slot)
            for code, key, slot in zip(codes, keys, slots, strict=True)
        ]
        refused = [
            key
            for key, code, good in zip(keys, codes, whole, strict=True)
            if code >= 0 and not good
        ]
        if refused:
            # Another worker can store the right block then.
            self._store.remove(refused)
        return whole

    def _memory_of(self, target: Slots, shard: int) -> Slots:
        """Slots for blocks of another shard. The memory is made when it is needed first."""
        if self._shard_memory is None:
            sources = [source for memory in self._memories for source in memory.others]
            self._shard_memory = ShardMemory(sources)
            self._store.register([self._shard_memory.whole()])
        return self._shard_memory.slots_of(target.others[shard - 1])

    def _has_seal(self, memory: Slots, key: str, slot: int) -> bool:
        return is_sealed(self._secret, key, memory.content_of(slot), bytes(memory.seal_of(slot)))

    @staticmethod
    def _steps(
        memory: Slots, keys: Sequence[str], slots: Sequence[int]
    ) -> Iterator[tuple[list[str], list[int]]]:
        step = max(1, min(_STEP_BLOCKS, STEP_BYTES // memory.object_bytes))
        for start in range(0, len(keys), step):
            yield list(keys[start : start + step]), list(slots[start : start + step])

    @staticmethod
    def _call(
        call: Callable[[list[str], list[int], int], list[int]],
        memory: Slots,
        keys: list[str],
        slots: list[int],
    ) -> list[int]:
        codes = call(keys, [memory.object_at(slot) for slot in slots], memory.object_bytes)
        if len(codes) != len(keys) or any(code in _LOST for code in codes):
            raise TransferFailed(f"the store has failed (code {min(codes, default=0)})")
        return codes
