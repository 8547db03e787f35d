"""How much the KV of one prefill worker may differ from what this worker computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace_engine.interface import BlockErrors

LEARNED_COMPARISONS: Final = 8
_MARGIN: Final = 4.0
"""Times the largest difference of the comparisons that were learned from."""


class _Bounds(NamedTuple):
    """Of a tolerance: nothing below the first is a fault, and nothing above the second is learned."""

    least: float
    most: float


_BOUNDS: Final = {
    "float32": _Bounds(0.001, 0.02),
    "float16": _Bounds(0.01, 0.1),
    "bfloat16": _Bounds(0.05, 0.15),
}
_QUANTIZED: Final = _Bounds(0.1, 0.25)
"""One value of a pair may be rounded up and the other one down."""


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """The first layer that differs by more than its tolerance, and its head that differs most."""

    layer: int
    head: int
    error: float
    tolerance: float

    def __str__(self) -> str:
        return f"layer {self.layer}, head {self.head} differ by {self.error:.2g}, more than {self.tolerance:.2g}"


class PairTolerance:
    """The tolerance of each layer, for one pair of workers.

    The first comparisons are held against the bound of the type. A pair with a fault at its start exceeds it, so the
    fault is not learned.
    """

    def __init__(self, dtype: str) -> None:
        """`dtype`: the layout's name of the type of KV."""
        self._bounds = _BOUNDS.get(dtype, _QUANTIZED)
        self._largest: dict[int, float] = {}
        self._comparisons = 0

    @property
    def learned(self) -> bool:
        """Whether it has seen enough comparisons."""
        return self._comparisons >= LEARNED_COMPARISONS

    def difference(self, errors: BlockErrors) -> Difference | None:
        """None where every head is within its tolerance."""
        found: dict[int, Difference] = {}
        for (layer, head), error in errors.items():
            one = Difference(layer, head, error, self._tolerance(layer))
            if error > one.tolerance and (layer not in found or error > found[layer].error):
                found[layer] = one
        return found[min(found)] if found else None

    def learn(self, errors: BlockErrors) -> None:
        """A comparison without a difference. Later ones change nothing."""
        if self.learned:
            return
        self._comparisons += 1
        for (layer, _), error in errors.items():
            self._largest[layer] = max(error, self._largest.get(layer, 0.0))

    def _tolerance(self, layer: int) -> float:
        least, most = self._bounds
        if not self.learned:
            return most
        return min(most, max(least, _MARGIN * self._largest.get(layer, most)))
