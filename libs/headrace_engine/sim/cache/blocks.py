"""Who holds which KV block, and which blocks hold a known prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np


class BlockPool:
    """Counts the holders of blocks 0 to `count`. Blocks with a known prefix stay findable until
    they are needed.

    `on_cleared` is told of blocks whose content is worth nothing any more, and before that
    `on_forgotten` of prefixes that cannot be found any more, and of the blocks that still hold them.
    """

    def __init__(
        self,
        count: int,
        on_cleared: Callable[[Sequence[int]], None],
        on_forgotten: Callable[[Sequence[int], Sequence[int]], None] | None = None,
    ) -> None:
        self.count = count
        self._on_cleared = on_cleared
        self._on_forgotten = on_forgotten
        self._holders = [0] * count
        self._free = np.ones(count, bool)
        self._free_count = count
        self._block_of: dict[int, int] = {}
        self._prefix_of: dict[int, int] = {}
        # Blocks with a prefix but no holder, the one to give up first in front.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available_count(self) -> int:
        """Blocks that nobody holds."""
        return self._free_count + len(self._idle)

    def free_ids(self) -> tuple[int, ...]:
        """Blocks that hold nothing."""
        return tuple(np.flatnonzero(self._free).tolist())

    def cached(self, prefixes: Sequence[int]) -> list[int]:
        """Blocks of the longest known run of `prefixes`, which are the prefix hashes of consecutive
        blocks.
        """
        found: list[int] = []
        for prefix in prefixes:
            block = self._block_of.get(prefix)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, block_ids: Sequence[int]) -> None:
        """Adds a holder to blocks that `cached` found."""
        for block in block_ids:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int] | None:
        """New blocks with one holder, contiguous where possible; None when there are too few."""
        if count > self.available_count:
            return None
        if count > self._free_count:
            self._give_up(count - self._free_count)
        chosen = self._contiguous(count)
        self._free[chosen] = False
        self._free_count -= count
        for block in chosen:
            self._holders[block] = 1
        return chosen

    def publish(self, block: int, prefix: int) -> bool:
        """Makes a held, complete block findable, unless another already holds the same. Returns
        whether it did.
        """
        if prefix in self._block_of or block in self._prefix_of:
            return False
        self._block_of[prefix] = block
        self._prefix_of[block] = prefix
        return True

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes a holder from each block. The last blocks of a prompt are the first to be given up."""
        cleared: list[int] = []
        for block in reversed(block_ids):
            assert self._holders[block] > 0
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._prefix_of:
                self._idle[block] = None
            else:
                cleared.append(block)
        self._clear(cleared)

    def forget(self) -> None:
        """Gives up every known prefix that no holder needs."""
        self._give_up(len(self._idle))

    def _give_up(self, count: int) -> None:
        victims = [self._idle.popitem(last=False)[0] for _ in range(count)]
        forgotten = [self._prefix_of.pop(block) for block in victims]
        for prefix in forgotten:
            del self._block_of[prefix]
        if self._on_forgotten is not None:
            self._on_forgotten(forgotten, victims)
        self._clear(victims)

    def _clear(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._free[list(block_ids)] = True
            self._free_count += len(block_ids)
            self._on_cleared(block_ids)

    def _contiguous(self, count: int) -> list[int]:
        if count == 0:
            return []
        free = np.flatnonzero(self._free)
        runs = np.split(free, np.flatnonzero(np.diff(free) != 1) + 1)
        fitting = [run for run in runs if len(run) >= count]
        if fitting:
            return [int(block) for block in min(fitting, key=len)[:count]]
        runs.sort(key=len, reverse=True)
        return [int(block) for block in np.concatenate(runs)[:count]]
