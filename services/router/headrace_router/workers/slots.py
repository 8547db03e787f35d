"""The request slots of the decode workers, and the part of them that one router may use. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# One free slot in this many is left to other routers' next requests.
_SLOTS_PER_FREE_SLOT: Final = 20


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """`total`: `max_num_seqs` of all reachable decode workers of a model. `external`: requests of other routers there,
    as the workers reported them. `routers`: live routers, this one included.
    """

    total: int
    external: int = 0
    routers: int = 1

    def available(self) -> int:
        """The slots that this router may use, 0 when no worker is reachable.

        An equal part is always its own. Beyond that it may use slots that other routers leave idle, less a few: with a
        free slot, another router's next request starts and is reported, and then this router gives back.
        """
        if not self.total or self.routers <= 1:
            return self.total
        equal_part = max(1, self.total // self.routers)
        left_free = max(1, self.total // _SLOTS_PER_FREE_SLOT)
        return max(equal_part, self.total - self.external - left_free)
