"""Slots: the bit of the masks that stands for each worker."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import InternalError
from headrace_kv.layout.layout import WorkerRef
from headrace_router.prefix_cache.depths import Depths

# Of the binary digits of a number of blocks.
_PLACE_VALUES: Final = 2.0 ** np.arange(53)


class SlotPool:
    """Assigns slots from 0 up, the lowest free one first. A retired slot is free once its bit is on no block."""

    def __init__(self, slots_max: int) -> None:
        self.slots_max = slots_max
        self.retired = 0
        self._used = 0
        self._ref_of: dict[int, WorkerRef] = {}

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
        self.retired |= 1 << slot

    def reclaim(self, mask: int) -> None:
        """Frees retired slots with bits that no block carries."""
        self.retired &= ~mask
        self._used &= ~mask

    def refs(self, slots: NDArray[np.intp]) -> list[WorkerRef]:
        """The workers of these slots."""
        return list(map(self._ref_of.__getitem__, slots.tolist()))

    def blocks(self, depths: Depths) -> NDArray[np.float64]:
        """The depths by slot. Shape [slot], up to the last slot in use."""
        width = self._used.bit_length()
        places = [place for place, digit in enumerate(depths.digits) if digit]
        if not places:
            return np.zeros(width)
        size = -(-width // 8)
        packed = b"".join([depths.digits[place].to_bytes(size, "little") for place in places])
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        # Unlike a product of matrices, einsum uses no threads.
        found: NDArray[np.float64] = np.einsum(
            "n,ns->s", _PLACE_VALUES[places], bits.reshape(len(places), 8 * size)
        )
        return found[:width]

    def by_worker(
        self, slots: NDArray[np.intp], numbers: NDArray[np.float64]
    ) -> dict[WorkerRef, int]:
        """The whole part of each number by the worker of its slot. Workers without any are left out."""
        rows = numbers.nonzero()[0]
        whole = numbers[rows].astype(np.int64)
        return dict(zip(self.refs(slots[rows]), whole.tolist(), strict=True))

    def slots(self, mask: int) -> NDArray[np.intp]:
        """The slots of a mask, in rising order."""
        packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(packed, bitorder="little"))
