"""Which bit of the masks stands for which worker."""

from __future__ import annotations

from typing import Final

from headrace_common.errors import InternalError
from headrace_kv.layout import WorkerRef

_REMEMBERED_MASKS_MAX: Final = 4_096


class SlotPool:
    """Slots from 0 up, the lowest free one first. A retired slot is free only once its bit has been swept."""

    def __init__(self, slots_max: int) -> None:
        self.slots_max = slots_max
        self.retired = 0
        self._used = 0
        self._ref_of: dict[int, WorkerRef] = {}
        self._refs_of_mask: dict[int, dict[WorkerRef, int]] = {}

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

    def scored(self, mask: int, blocks: int) -> dict[WorkerRef, int]:
        """Each worker of a mask with that many blocks."""
        return dict.fromkeys(self._remembered(mask), blocks)

    def _remembered(self, mask: int) -> dict[WorkerRef, int]:
        """Lookups return the same masks again and again, and copying a dictionary hashes no worker again."""
        found = self._refs_of_mask.get(mask)
        if found is None:
            if len(self._refs_of_mask) >= _REMEMBERED_MASKS_MAX:
                self._refs_of_mask.clear()
            found = {ref: 0 for slot, ref in sorted(self._ref_of.items()) if mask >> slot & 1}
            self._refs_of_mask[mask] = found
        return found
