"""How many blocks of a prompt each worker holds, as binary digits of all workers at once. Pure.

So a lookup counts with a few operations on integers. No Python statement runs once for each worker or each depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor


@dataclass(frozen=True, slots=True)
class Depths:
    """`digits[n]` is the mask of the workers with binary digit n in their number of blocks. Others hold none."""

    digits: tuple[int, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[tuple[int, int]]) -> Depths:
        """From (number, mask) pairs: the workers of `mask` hold `number` blocks. No worker is in two masks."""
        digits: list[int] = []
        for number, mask in numbers:
            digits += [0] * (number.bit_length() - len(digits))
            for place in range(number.bit_length()):
                if number >> place & 1:
                    digits[place] |= mask
        return cls(tuple(digits))

    @classmethod
    def counted(cls, holders: Sequence[int]) -> Depths:
        """From the mask of each block's holders. Each mask is a subset of the one before.

        A worker in `n` of the masks is in `n >> p` of every `2 ** p`-th mask. Whether that is odd is digit `p` of `n`.
        """
        places = range(len(holders).bit_length())
        return cls(tuple(reduce(xor, holders[(1 << p) - 1 :: 1 << p]) for p in places))

    def __bool__(self) -> bool:
        return any(self.digits)
