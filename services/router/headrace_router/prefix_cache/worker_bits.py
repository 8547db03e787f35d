"""Slots: the bit of the masks that stands for each worker."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import InternalError
from headrace_kv.layout.layout import WorkerRef
from headrace_router.prefix_cache.lookup import Depths

_CACHED_MASKS_MAX: Final = 4_096
# Masks with at most so many bits are split into slots bit by bit.
_SPARSE_BITS_MAX: Final = 3
# With at most so many masks, splitting does not pay.
_FEW_MASKS_MAX: Final = 3


class SlotPool:
    """Assigns slots from 0 up, the lowest free one first. A retired slot is free once its bit is on no block."""

    def __init__(self, slots_max: int) -> None:
        self.slots_max = slots_max
        self.retired = 0
        self._used = 0
        self._ref_of: dict[int, WorkerRef] = {}
        self._refs_of_mask: dict[int, dict[WorkerRef, int]] = {}
        self._slots_of_mask: dict[int, NDArray[np.intp]] = {}

    @property
    def exhausted(self) -> bool:
        """Whether no slot is free."""
        return self._used.bit_count() >= self.slots_max

    def assign(self, ref: WorkerRef) -> int:
        """Assigns the worker a slot. Raises InternalError when none is free."""
        if self.exhausted:
            raise InternalError(f"all {self.slots_max} slots of the prefix index are taken")
        slot = (~self._used & self._used + 1).bit_length() - 1
        self._used |= 1 << slot
        self._ref_of[slot] = ref
        return slot

    def retire(self, slot: int) -> None:
        """Takes the slot from its worker. Blocks may still carry its bit."""
        del self._ref_of[slot]
        self._refs_of_mask.clear()
        self.retired |= 1 << slot

    def reclaim(self, mask: int) -> None:
        """Frees retired slots with bits that no block carries."""
        self.retired &= ~mask
        self._used &= ~mask

    def refs(self, mask: int) -> tuple[WorkerRef, ...]:
        """The workers of a mask, in the order of their slots."""
        return tuple(self._cached_refs(mask))

    def scores(self, depths: Depths) -> dict[WorkerRef, int]:
        """The depths by worker."""
        if len(depths) == 1:
            ((blocks, mask),) = depths
            return dict.fromkeys(self._cached_refs(mask), blocks)
        ref_of = self._ref_of
        scores: dict[WorkerRef, int] = {}
        for blocks, mask in depths:
            if mask.bit_count() > 1:
                scores.update(dict.fromkeys(self._cached_refs(mask), blocks))
            else:
                scores[ref_of[mask.bit_length() - 1]] = blocks
        return scores

    def blocks(self, depths: Depths) -> NDArray[np.float64]:
        """The depths by slot. Shape [slot], up to the last slot in use."""
        found = np.zeros(self._used.bit_length())
        widths: list[int] = []
        counts: list[int] = []
        for blocks, mask in depths:
            holders = mask.bit_count()
            if holders > _SPARSE_BITS_MAX or len(depths) <= _FEW_MASKS_MAX:
                found[self._cached_slots(mask)] = blocks
                continue
            widths.append(width := mask.bit_length())
            counts.append(blocks)
            if holders > 1:
                others = mask ^ 1 << width - 1
                while others:
                    widths.append(width := others.bit_length())
                    counts.append(blocks)
                    others ^= 1 << width - 1
        if widths:
            found[np.fromiter(widths, np.intp, len(widths)) - 1] = np.fromiter(
                counts, np.float64, len(counts)
            )
        return found

    def slots(self, mask: int) -> NDArray[np.intp]:
        """The slots of a mask, in rising order."""
        packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(packed, bitorder="little"))

    def _cached_slots(self, mask: int) -> NDArray[np.intp]:
        found = self._slots_of_mask.get(mask)
        if found is None:
            if len(self._slots_of_mask) >= _CACHED_MASKS_MAX:
                self._slots_of_mask.clear()
            found = self._slots_of_mask[mask] = self.slots(mask)
        return found

    def _cached_refs(self, mask: int) -> dict[WorkerRef, int]:
        """Cached because lookups repeat masks. A copy of the dictionary does not hash the workers again."""
        found = self._refs_of_mask.get(mask)
        if found is None:
            if len(self._refs_of_mask) >= _CACHED_MASKS_MAX:
                self._refs_of_mask.clear()
            found = {ref: 0 for slot, ref in sorted(self._ref_of.items()) if mask >> slot & 1}
            self._refs_of_mask[mask] = found
        return found
