"""One tier's table of block hash -> bitmask of the workers that hold the block.

The dictionary holds only integers, so the garbage collector never traverses it. Equal masks share one object.
Neighbouring blocks mostly have the same holders, so a comparison of objects finds long runs that change together.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Final

from headrace_kv.prefix.hashing import PromptHashes
from headrace_router.prefix_cache.depths import Depths
from headrace_router.prefix_cache.lookup import depths_of_hashes, depths_of_prompt, linear_lookup

# The size of one hash as a key: an integer of three digits, rounded up to the allocator's step.
_KEY_BYTES: Final = 48
_SHARED_MASKS_MAX: Final = 65_536


class PrefixTable:
    """Sets and clears the bits of worker slots. `find` is exact while each slot's set is prefix-closed."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self.hole_count = 0
        self._mask_of: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._probe = 0
        self._unswept: list[int] = []

    def __len__(self) -> int:
        return len(self._mask_of)

    def memory_bytes(self) -> int:
        """The memory of the blocks, as the interpreter reports it."""
        masks = sum(map(sys.getsizeof, self._shared)) + sys.getsizeof(self._shared)
        return sys.getsizeof(self._mask_of) + _KEY_BYTES * len(self._mask_of) + masks

    def add(self, bit: int, hashes: Sequence[int]) -> tuple[int, int]:
        """Sets the bit of a slot in use for distinct blocks in order.

        Returns how many did not have the bit, and how many at the end did not fit.
        """
        room = self.blocks_max - len(self._mask_of)
        if room < len(hashes):
            hashes, refused = self._cut_to(room, hashes)
        else:
            refused = 0
        mask_of = self._mask_of
        before = len(mask_of)
        # One pass stores the bit of new blocks and returns the holders of the others.
        olds = list(map(mask_of.setdefault, hashes, repeat(bit)))
        fresh = len(mask_of) - before
        if not olds or olds.count(old := olds[0]) != len(olds):
            return fresh + self._add_one_by_one(bit, hashes), refused
        if old & bit:
            return fresh, refused
        mask_of.update(zip(hashes, repeat(self._share(old | bit)), strict=False))
        return len(hashes), refused

    def remove(self, bit: int, hashes: Sequence[int]) -> int:
        """Clears the bit of distinct blocks. Returns how many had it."""
        olds = list(map(self._mask_of.get, hashes, repeat(0)))
        if not olds or olds.count(old := olds[0]) != len(olds):
            return self._remove_one_by_one(bit, hashes)
        if not old & bit:
            return 0
        if old == bit:
            deque(map(self._mask_of.pop, hashes, repeat(None)), maxlen=0)
        else:
            self._mask_of.update(zip(hashes, repeat(self._share(old ^ bit)), strict=False))
        return len(hashes)

    def find(self, hashes: Sequence[int], among: int) -> Depths:
        """How many blocks of this chain each worker of the mask `among` holds."""
        if not hashes:
            return Depths()
        mask_of = self._mask_of.get
        known = mask_of(hashes[0], 0)
        first = known & among
        if not first:
            return Depths()
        end = mask_of(hashes[-1], 0) & first
        # Each lookup probes a different block, so that a hole is detected soon.
        self._probe = probe = self._probe + 7919 & 0xFFFF_FFFF
        if mask_of(hashes[probe % len(hashes)], 0) & end == end:
            if end == first:
                return Depths.of([(len(hashes), first)])
            found = depths_of_hashes(mask_of, hashes, known, first, end)
            if found is not None:
                return found
        self.hole_count += 1
        return linear_lookup(mask_of, hashes, first)

    def find_prompt(self, prompt: PromptHashes, among: int) -> Depths:
        """The same for a prompt. It hashes about twice as many blocks as the deepest holder has, at most."""
        if not prompt.block_count or not self._mask_of:
            return Depths()
        mask_of = self._mask_of.get
        known = mask_of(prompt[0], 0)
        first = known & among
        if not first:
            return Depths()
        found = depths_of_prompt(mask_of, prompt, known, first)
        if found.depths is not None:
            if not found.end:
                return found.depths
            self._probe = probe = self._probe + 7919 & 0xFFFF_FFFF
            if mask_of(prompt[probe % found.block_count], 0) & found.end == found.end:
                return found.depths
        self.hole_count += 1
        return linear_lookup(mask_of, prompt.first(found.block_count), first)

    def start_sweep(self) -> None:
        """Lists all current blocks for `sweep`."""
        self._unswept = list(self._mask_of)

    def sweep(self, gone: int, budget: int) -> int:
        """Clears the bits of the mask `gone` from up to `budget` blocks. Returns how many blocks it visited."""
        mask_of = self._mask_of
        visited = self._unswept[-budget:]
        del self._unswept[-budget:]
        last, fresh = 0, 0
        for block in visited:
            old = mask_of.get(block)
            if old is None or not old & gone:
                continue
            if old is not last:
                last = old
                fresh = self._share(old & ~gone)
            if fresh:
                mask_of[block] = fresh
            else:
                del mask_of[block]
        return len(visited)

    def _share(self, mask: int) -> int:
        """The shared object for masks of this value."""
        if len(self._shared) >= _SHARED_MASKS_MAX:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    def _cut_to(self, room: int, hashes: Sequence[int]) -> tuple[Sequence[int], int]:
        """The longest prefix of `hashes` with at most `room` unknown blocks, and how many hashes are left out."""
        for position, block in enumerate(hashes):
            if block not in self._mask_of:
                if room <= 0:
                    return hashes[:position], len(hashes) - position
                room -= 1
        return hashes, 0

    def _add_one_by_one(self, bit: int, hashes: Sequence[int]) -> int:
        """Sets the bit of known blocks. Returns how many did not have it."""
        mask_of = self._mask_of
        last = joined = added = 0
        for block in hashes:
            old = mask_of[block]
            if old & bit:
                continue
            if old is not last:
                last = old
                joined = self._share(old | bit)
            mask_of[block] = joined
            added += 1
        return added

    def _remove_one_by_one(self, bit: int, hashes: Sequence[int]) -> int:
        mask_of = self._mask_of
        last = fresh = removed = 0
        for block in hashes:
            old = mask_of.get(block)
            if old is None or not old & bit:
                continue
            if old is not last:
                last = old
                fresh = self._share(old ^ bit)
            if fresh:
                mask_of[block] = fresh
            else:
                del mask_of[block]
            removed += 1
        return removed
