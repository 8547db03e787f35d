"""Moves sealed blocks between slots of memory and a store. Blocks the calling thread; bounded by its process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from headrace_common.errors import TransferFailed
from headrace_kv.pool.seal import SEAL_BYTES, is_sealed, seal_of

STORED: Final = 0
ABSENT: Final = -704
PRESENT: Final = -705
"""Status codes, which are those of Mooncake Store."""
_LOST: Final = range(-999, -799)
"""Transfers and calls that failed: the store itself is lost, not a block."""
_STEP_BLOCKS: Final = 64
_STEP_BYTES: Final = 32 << 20


class BlockStore(Protocol):
    """A shared store of bytes by key. It reads and writes memory by address, which was registered before."""

    def exist(self, keys: list[str]) -> list[int]:
        """1 for a key that is there, 0 for one that is not, else a status code."""

    def get(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        """Reads objects of at most `nbytes` each. Returns their sizes, or a status code."""

    def put(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        """Stores objects. Returns STORED or a status code."""

    def remove(self, keys: list[str]) -> None:
        """Removes objects, if they are there."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory at `address`, cut in slots. See PoolMemory."""

    address: int
    slot_bytes: int
    slot_count: int
    object_bytes: int

    def object_at(self, slot: int) -> int:
        """The address of a slot. Raises TransferFailed for a number that no slot has."""
        if not 0 <= slot < self.slot_count:
            raise TransferFailed(f"there is no slot {slot} among {self.slot_count}")
        return self.address + slot * self.slot_bytes

    def content_of(self, slot: int) -> memoryview:
        """The bytes of a slot before the seal."""
        return self._view(slot)[:-SEAL_BYTES]

    def seal_of(self, slot: int) -> memoryview:
        """The seal of a slot."""
        return self._view(slot)[-SEAL_BYTES:]

    def _view(self, slot: int) -> memoryview:
        array = (ctypes.c_uint8 * self.object_bytes).from_address(self.object_at(slot))
        return memoryview(array).cast("B")


class BlockClient:
    """Seals what it stores, and checks what it reads. Several threads may call it, with different slots.

    Every call raises TransferFailed when the store is lost.
    """

    def __init__(self, store: BlockStore, memories: Sequence[Slots], secret: bytes) -> None:
        self._store = store
        self._memories = memories
        self._secret = secret

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether the store has each key."""
        found: list[int] = []
        for start in range(0, len(keys), _STEP_BLOCKS * 8):
            found += self._store.exist(list(keys[start : start + _STEP_BLOCKS * 8]))
        if any(code < 0 for code in found):
            raise TransferFailed(f"the store cannot be asked (code {min(found)})")
        return [code == 1 for code in found]

    def get(self, memory: int, keys: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Reads blocks. Blocks after the first one that is missing are not read: a prefix needs all before it."""
        target = self._memories[memory]
        read: list[bool] = []
        for part, places in self._steps(target, keys, slots):
            codes = self._call(self._store.get, target, part, places)
            whole = [
                code == target.object_bytes and self._has_seal(target, key, slot)
                for code, key, slot in zip(codes, part, places, strict=True)
            ]
            refused = [
                key
                for key, code, good in zip(part, codes, whole, strict=True)
                if code >= 0 and not good
            ]
            if refused:
                # Another worker can store the right block then.
                self._store.remove(refused)
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

    def _has_seal(self, memory: Slots, key: str, slot: int) -> bool:
        return is_sealed(self._secret, key, memory.content_of(slot), bytes(memory.seal_of(slot)))

    @staticmethod
    def _steps(
        memory: Slots, keys: Sequence[str], slots: Sequence[int]
    ) -> Iterator[tuple[list[str], list[int]]]:
        step = max(1, min(_STEP_BLOCKS, _STEP_BYTES // memory.object_bytes))
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
