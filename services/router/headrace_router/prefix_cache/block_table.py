"""One tier's table of block hash -> bitmask of the workers that hold the block.

The dictionary holds only integers, so the garbage collector never traverses it. Neighbouring blocks mostly have the
same holders, so their masks share one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate, chain, repeat
from operator import and_, xor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_kv.prefix.hashing import CHECKPOINT_BLOCKS, PromptHashes

Depths = list[tuple[int, int]]
"""(number, mask) pairs. A worker holds as many blocks as the sum of the numbers of the masks that it is in."""

_FIRST_BLOCKS: Final = 4 * CHECKPOINT_BLOCKS
# Where workers end in both halves of a span, it is read if it has at most so many blocks for each of them.
_BLOCKS_PER_END: Final = 8
_READ_BLOCKS_MAX: Final = 256


class PrefixTable:
    """Sets and clears the bits of worker slots. `find` is exact while each slot's set is prefix-closed."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._mask_of: dict[int, int] = {}
        self._unswept: list[int] = []

    def __len__(self) -> int:
        return len(self._mask_of)

    def add(self, bit: int, hashes: Sequence[int]) -> tuple[int, int]:
        """Sets the bit of a slot for distinct blocks in order.

        Returns how many did not have the bit, and how many at the end did not fit.
        """
        mask_of = self._mask_of
        room = self.blocks_max - len(mask_of)
        last, joined, added = 0, bit, 0
        for position, block in enumerate(hashes):
            old = mask_of.get(block, 0)
            if old is not last:
                last, joined = old, old | bit if old else bit
            if old == joined:
                continue
            if not old:
                if not room:
                    return added, len(hashes) - position
                room -= 1
            mask_of[block] = joined
            added += 1
        return added, 0

    def remove(self, bits: int, hashes: Iterable[int]) -> int:
        """Clears the bits of a mask for distinct blocks. Returns how many had any of them."""
        mask_of = self._mask_of
        last = rest = removed = 0
        for block in hashes:
            old = mask_of.get(block, 0)
            if old is not last:
                last, rest = old, old & ~bits
            if old == rest:
                continue
            if rest:
                mask_of[block] = rest
            else:
                del mask_of[block]
            removed += 1
        return removed

    def find(self, hashes: list[int] | PromptHashes, among: int) -> Depths:
        """How many blocks of this chain each worker of the mask `among` holds. Workers without the first are left out.

        Of a prompt, it hashes about twice as many blocks as the deepest holder has, at most.
        """
        if not self._mask_of:
            return []
        mask_of = self._mask_of.get
        last = len(hashes) - 1
        holders = mask_of(hashes[0], 0) & among if last >= 0 else 0
        depths: Depths = []
        low, high = -1, min(_FIRST_BLOCKS - 1, last)
        while holders and low < last:
            left = mask_of(hashes[high], 0) & holders
            if left != holders:
                holders = self._find_ends(hashes, (low, high), holders, left, depths)
            low, high = high, min(2 * high + 1, last)
        if holders:
            depths.append((last + 1, holders))
        return depths

    def _find_ends(
        self,
        hashes: list[int] | PromptHashes,
        span: tuple[int, int],
        before: int,
        after: int,
        depths: Depths,
    ) -> int:
        """Adds the workers that hold the first block of a span, but not all. Returns the others.

        `before` and `after` are the workers that hold its first and its last block.
        """
        low, high = span
        # A checkpoint, which is computed already.
        middle = (low + high) // 2 | CHECKPOINT_BLOCKS - 1
        mask = self._mask_of.get(hashes[middle], 0) & before if middle < high else before
        read_blocks = CHECKPOINT_BLOCKS
        if before != mask != after:
            ending = (before ^ after).bit_count()
            read_blocks = min(_BLOCKS_PER_END * ending, _READ_BLOCKS_MAX)
        if high - low <= read_blocks:
            masks = map(self._mask_of.get, hashes[low + 1 : high], repeat(0))
            held = list(accumulate(chain(masks, (after,)), and_, initial=before))
            ending = before ^ held[-1]
            depths.append((low + 1, ending))
            # A worker with n more blocks is in n >> p of every (1 << p)-th mask. If that is odd, n has binary digit p.
            depths += [
                (1 << place, mask)
                for place in range((high - low - 1).bit_length())
                if (mask := reduce(xor, held[1 << place :: 1 << place]) & ending)
            ]
            return held[-1]
        if mask != before:
            mask = self._find_ends(hashes, (low, middle), before, mask, depths)
        after &= mask
        if mask != after:
            after = self._find_ends(hashes, (middle, high), mask, after, depths)
        return after

    def start_sweep(self) -> None:
        """Lists all current blocks for `sweep`."""
        self._unswept = list(self._mask_of)

    def sweep(self, gone: int, budget: int) -> int:
        """Clears the bits of the mask `gone` from up to `budget` blocks. Returns how many blocks it visited."""
        visited = self._unswept[-budget:]
        del self._unswept[-budget:]
        self.remove(gone, visited)
        return len(visited)


def by_slot(depths: Depths, width: int) -> NDArray[np.float64]:
    """The number of blocks of each slot. Shape [slot], `width` slots."""
    if not depths:
        return np.zeros(width)
    size = -(-width // 8)
    packed = b"".join([mask.to_bytes(size, "little") for _, mask in depths])
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    numbers = np.array([number for number, _ in depths], np.float64)
    # Unlike a product of matrices, einsum uses no threads.
    found: NDArray[np.float64] = np.einsum("n,ns->s", numbers, bits.reshape(len(depths), 8 * size))
    return found[:width]
