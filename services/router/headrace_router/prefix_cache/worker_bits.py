"""Which bit of the masks stands for which worker."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import InternalError
from headrace_kv.layout.layout import WorkerRef
from headrace_router.prefix_cache.lookup import Depths

_REMEMBERED_MASKS_MAX: Final = 4_096
# So few workers are found in a mask one by one.
_PEELED_MAX: Final = 3
# With so few masks it is not worth while.
_APART_MAX: Final = 3


class SlotPool:
    """Slots from 0 up, the lowest free one first. A retired slot is free only once its bit has been swept."""

    def __init__(self, slots_max: int) -> None:
        self.slots_max = slots_max
        self.retired = 0
        self._used = 0
        self._ref_of: dict[int, WorkerRef] = {}
        self._refs_of_mask: dict[int, dict[WorkerRef, int]] = {}
        self._slots_of_mask: dict[int, NDArray[np.intp]] = {}

    @property
    def exhausted(self) -> bool:
        """Whether `take` would find nothing."""
        return self._used.bit_count() >= self.slots_max

    def take(self, ref: WorkerRef) -> int:
        """A slot for the worker."""
        if self.exhausted:
            raise InternalError(f"all {self.slots_max} slots of the prefix index are taken")
        slot = (~self._used & self._used + 1).bit_length() - 1
        self._used |= 1 << slot
        self._ref_of[slot] = ref
        return slot

    def retire(self, slot: int) -> None:
        """The slot stands for nobody any more, though blocks still carry its bit."""
        del self._ref_of[slot]
        self._refs_of_mask.clear()
        self.retired |= 1 << slot

    def reclaim(self, mask: int) -> None:
        """No block carries these retired slots' bits."""
        self.retired &= ~mask
        self._used &= ~mask

    def refs(self, mask: int) -> tuple[WorkerRef, ...]:
        """The workers of a mask, by slot."""
        return tuple(self._remembered(mask))

    def scored(self, depths: Depths) -> dict[WorkerRef, int]:
        """Each worker's blocks."""
        if len(depths) == 1:
            ((blocks, mask),) = depths
            return dict.fromkeys(self._remembered(mask), blocks)
        ref_of = self._ref_of
        scores: dict[WorkerRef, int] = {}
        for blocks, mask in depths:
            if mask.bit_count() > 1:
                scores.update(dict.fromkeys(self._remembered(mask), blocks))
            else:
                scores[ref_of[mask.bit_length() - 1]] = blocks
        return scores

    def blocks(self, depths: Depths) -> NDArray[np.float64]:
        """The same by slot. Shape [slot], up to the last one in use."""
        found = np.zeros(self._used.bit_length())
        widths: list[int] = []
        counts: list[int] = []
        for blocks, mask in depths:
            holders = mask.bit_count()
            if holders > _PEELED_MAX or len(depths) <= _APART_MAX:
                found[self._remembered_slots(mask)] = blocks
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
        """The slots of a mask, rising."""
        packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(packed, bitorder="little"))

    def _remembered_slots(self, mask: int) -> NDArray[np.intp]:
        found = self._slots_of_mask.get(mask)
        if found is None:
            if len(self._slots_of_mask) >= _REMEMBERED_MASKS_MAX:
                self._slots_of_mask.clear()
            found = self._slots_of_mask[mask] = self.slots(mask)
        return found

    def _remembered(self, mask: int) -> dict[WorkerRef, int]:
        """Lookups return the same masks again and again, and copying a dictionary hashes no worker again."""
        found = self._refs_of_mask.get(mask)
        if found is None:
            if len(self._refs_of_mask) >= _REMEMBERED_MASKS_MAX:
                self._refs_of_mask.clear()
            found = {ref: 0 for slot, ref in sorted(self._ref_of.items()) if mask >> slot & 1}
            self._refs_of_mask[mask] = found
        return found
