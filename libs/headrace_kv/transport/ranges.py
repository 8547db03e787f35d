"""Address ranges of registered memory. Pure."""

from __future__ import annotations

import numpy as np

from headrace_kv.plan.copy_plan import Int64Array


class MemoryRanges:
    """Ranges [start, end) of addresses. Threads may call `covers` while another adds a range."""

    def __init__(self, spans: tuple[tuple[int, int], ...] = ()) -> None:
        self.spans = spans

    def add(self, base_address: int, nbytes: int) -> None:
        """Adds [base_address, base_address + nbytes)."""
        self.spans = (*self.spans, (base_address, base_address + nbytes))

    def covers(self, addresses: Int64Array, lengths: Int64Array) -> bool:
        """Whether every [addresses[i], addresses[i] + lengths[i]) lies within one range. Shapes [run]."""
        if not len(addresses):
            return True
        ends = addresses + lengths
        low, high = int(addresses.min()), int(ends.max())
        if any(start <= low and high <= end for start, end in self.spans):
            return True
        if len(self.spans) < 2:
            return False
        inside = np.zeros(len(addresses), np.bool_)
        for start, end in self.spans:
            inside |= (addresses >= start) & (ends <= end)
        return bool(inside.all())
