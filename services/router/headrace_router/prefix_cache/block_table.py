"""One tier's table of block hash -> bitmask of the workers that hold the block.

The dictionary holds nothing but integers, so the garbage collector never walks it. Equal masks share one object:
neighbouring blocks mostly have the same holders, and comparing objects is how long runs are changed at once.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Final

from headrace_kv.prefix.hashing import PromptHashes
from headrace_router.prefix_cache.lookup import (
    Depths,
    depths_of_hashes,
    depths_of_prompt,
    linear_lookup,
)

# What one hash takes as a key: an integer of three digits, rounded up to the allocator's step.
_KEY_BYTES: Final = 48
_SHARED_MASKS_MAX: Final = 65_536


class PrefixTable:
    """Bits are set and cleared per worker slot; each slot's set must be prefix-closed for `find` to be exact."""

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
        """What the blocks take, by the interpreter's own accounts."""
        masks = sum(map(sys.getsizeof, self._shared)) + sys.getsizeof(self._shared)
        return sys.getsizeof(self._mask_of) + _KEY_BYTES * len(self._mask_of) + masks

    def add(self, bit: int, hashes: Sequence[int]) -> tuple[int, int]:
        """Sets the bit, of a slot in use, for distinct blocks in order.

        Returns how many did not have it, and how many of the last did not fit any more.
        """
        room = self.blocks_max - len(self._mask_of)
        if room < len(hashes):
            hashes, refused = self._within(room, hashes)
        else:
            refused = 0
        mask_of = self._mask_of
        before = len(mask_of)
        # One pass stores the bit of blocks that are new and tells the holders of the others.
        olds = list(map(mask_of.setdefault, hashes, repeat(bit)))
        fresh = len(mask_of) - before
        if not olds or olds.count(old := olds[0]) != len(olds):
            return fresh + self._join_one_by_one(bit, hashes), refused
        if old & bit:
            return fresh, refused
        mask_of.update(zip(hashes, repeat(self._share(old | bit)), strict=False))
        return len(hashes), refused

    def drop(self, bit: int, hashes: Sequence[int]) -> int:
        """Clears the bit for distinct blocks. Returns how many had it."""
        olds = list(map(self._mask_of.get, hashes, repeat(0)))
        if not olds or olds.count(old := olds[0]) != len(olds):
            return self._drop_one_by_one(bit, hashes)
        if not old & bit:
            return 0
        if old == bit:
            deque(map(self._mask_of.pop, hashes, repeat(None)), maxlen=0)
        else:
            self._mask_of.update(zip(hashes, repeat(self._share(old ^ bit)), strict=False))
        return len(hashes)

    def find(self, hashes: Sequence[int], among: int) -> Depths:
        """How deep each worker of the mask `among` holds this chain of blocks."""
        if not hashes:
            return []
        mask_of = self._mask_of.get
        known = mask_of(hashes[0], 0)
        first = known & among
        if not first:
            return []
        end = mask_of(hashes[-1], 0) & first
        # Another block every time, so that a set with a hole is found out soon.
        self._probe = probe = self._probe + 7919 & 0xFFFF_FFFF
        if mask_of(hashes[probe % len(hashes)], 0) & end == end:
            if end == first:
                return [(len(hashes), first)]
            found = depths_of_hashes(mask_of, hashes, known, first, end)
            if found is not None:
                return found
        self.hole_count += 1
        return linear_lookup(mask_of, hashes, first)

    def find_prompt(self, prompt: PromptHashes, among: int) -> Depths:
        """The same of a prompt, hashing little more of it than the answer needs."""
        if not prompt.block_count or not self._mask_of:
            return []
        mask_of = self._mask_of.get
        known = mask_of(prompt[0], 0)
        first = known & among
        if not first:
            return []
        found, reach = depths_of_prompt(mask_of, prompt, known, first)
        if found is not None:
            end = found[-1][1] if found[-1][0] == reach else 0
            if not end:
                return found
            self._probe = probe = self._probe + 7919 & 0xFFFF_FFFF
            if mask_of(prompt[probe % reach], 0) & end == end:
                return found
        self.hole_count += 1
        return linear_lookup(mask_of, prompt.first(reach), first)

    def start_sweep(self) -> None:
        """Every block that is there now is to be looked at by `sweep`."""
        self._unswept = list(self._mask_of)

    def sweep(self, gone: int, budget: int) -> int:
        """Clears the bits of the mask `gone` from up to `budget` blocks. Returns how many it looked at."""
        mask_of = self._mask_of
        looked_at = self._unswept[-budget:]
        del self._unswept[-budget:]
        last, fresh = 0, 0
        for block in looked_at:
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
        return len(looked_at)

    def _share(self, mask: int) -> int:
        """The one object for masks of this value."""
        if len(self._shared) >= _SHARED_MASKS_MAX:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    def _within(self, room: int, hashes: Sequence[int]) -> tuple[Sequence[int], int]:
        """The longest beginning of `hashes` whose unknown blocks fit in `room`, and how many are left out."""
        for position, block in enumerate(hashes):
            if block not in self._mask_of:
                if room <= 0:
                    return hashes[:position], len(hashes) - position
                room -= 1
        return hashes, 0

    def _join_one_by_one(self, bit: int, hashes: Sequence[int]) -> int:
        """Sets the bit of blocks that are all there. Returns how many did not have it."""
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

    def _drop_one_by_one(self, bit: int, hashes: Sequence[int]) -> int:
        mask_of = self._mask_of
        last = fresh = dropped = 0
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
            dropped += 1
        return dropped
