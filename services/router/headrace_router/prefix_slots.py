"""Which bit of the masks stands for which worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import InternalError
from headrace_kv.layout import WorkerRef
from headrace_router.prefix_depths import Depths

_REMEMBERED_MASKS_MAX: Final = 4_096
# So few masks are turned into slots one by one.
_APART_MAX: Final = 4


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
        if len(depths) <= _APART_MAX:
            for blocks, mask in depths:
                found[self._remembered_slots(mask)] = blocks
            return found
        counts, masks = zip(*depths, strict=True)
        if sum(map(int.bit_count, masks)) == len(masks):
            widths = np.fromiter(map(int.bit_length, masks), np.intp, len(masks))
            found[widths - 1] = np.fromiter(counts, np.float64, len(masks))
        else:
            rows, slots = np.nonzero(_bits(masks, len(found)))
            found[slots] = np.fromiter(counts, np.float64, len(masks))[rows]
        return found

    def slots(self, mask: int) -> NDArray[np.intp]:
        """The slots of a mask, rising."""
        return np.flatnonzero(_bits((mask,), self._used.bit_length())[0])

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


def _bits(masks: Sequence[int], slot_count: int) -> NDArray[np.uint8]:
    """One row for each mask, of ones and zeros by slot. No mask is wider."""
    nbytes = -(-slot_count // 8)
    packed = b"".join([mask.to_bytes(nbytes, "little") for mask in masks])
    bits = np.frombuffer(packed, np.uint8).reshape(len(masks), nbytes)
    return np.unpackbits(bits, axis=1, count=slot_count, bitorder="little")
