"""The order in which cached blocks without a holder are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, pairwise

from headrace_common.callers.priority import Priority


class IdleBlocks:
    """Cached blocks without a holder: by class, and within a class in the order in which they lost their last holder.

    A block of a lower class is reused first. A higher class protects a block until `count` blocks were reused since.
    Then it moves to the end of the next lower class, so that no class keeps blocks that requests no longer use.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._reused = 0
        # Blocks with the value of `_reused` when they were added, from the lowest class to the highest.
        self._classes: dict[Priority, OrderedDict[int, int]] = {
            priority: OrderedDict() for priority in sorted(Priority, reverse=True)
        }

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._classes.values())

    def add(self, block: int, priority: Priority) -> None:
        """A block has lost its last holder."""
        self._classes[priority][block] = self._reused

    def remove(self, block: int) -> None:
        """A block has a holder again, or is no longer cached. Raises KeyError for any other block."""
        for blocks in self._classes.values():
            if blocks.pop(block, None) is not None:
                return
        raise KeyError(block)

    def pop(self) -> int:
        """Removes the block to reuse next. Raises KeyError when there is none."""
        self._reused += 1
        for lower, higher in pairwise(self._classes.values()):
            self._end_protection(higher, lower)
        for blocks in self._classes.values():
            if blocks:
                return blocks.popitem(last=False)[0]
        raise KeyError("no block is idle")

    def _end_protection(self, blocks: OrderedDict[int, int], lower: OrderedDict[int, int]) -> None:
        """Moves blocks to the class below, as if they had just lost their last holder."""
        while blocks:
            block, added = next(iter(blocks.items()))
            if self._reused - added <= self._count:
                return
            del blocks[block]
            lower[block] = self._reused
