"""How often each caller does something that should be rare."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

CALLERS_MAX: Final = 4_096


class RateByCaller:
    """Permits `per_s` events of each caller, and at first `burst` of them.

    Knows the last `CALLERS_MAX` callers. A forgotten one has its whole burst again.
    """

    def __init__(
        self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Events that no time has paid for yet, and when they were counted."""

    def count(self, caller: str, weight: float = 1.0) -> None:
        """Counts an event as `weight` events, also one beyond the rate."""
        # What exceeds the burst by far would outlast its cause.
        debt = min(self._debt(caller) + weight, 2.0 * self._burst)
        self._debts[caller] = (debt, self._clock())
        self._debts.move_to_end(caller)
        if len(self._debts) > CALLERS_MAX:
            self._debts.popitem(last=False)

    def excess_s(self, caller: str) -> float:
        """Seconds until the caller is within the rate again. 0 while it is."""
        if caller not in self._debts:
            return 0.0
        return max(0.0, (self._debt(caller) - self._burst) / self._per_s)

    def _debt(self, caller: str) -> float:
        debt, at_s = self._debts.get(caller, (0.0, 0.0))
        return max(0.0, debt - (self._clock() - at_s) * self._per_s)
