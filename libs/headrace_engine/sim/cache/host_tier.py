"""Blocks that had to leave the engine's KV memory, kept in main memory for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from headrace_engine.sim.cache.memory import SimMemory
from headrace_engine.sim.model.model import WordArray

Content = tuple[WordArray, ...]
"""A block's bytes, a copy for each array of the KV memory that holds a part of it."""


class HostTier:
    """Up to `count` blocks by their prefix, those that came first given up first.

    `save` copies a block out of KV memory and `restore` back into it.
    """

    def __init__(
        self,
        count: int,
        save: Callable[[int], Content],
        restore: Callable[[int, Content], None],
    ) -> None:
        self._count = count
        self._save = save
        self._restore = restore
        self._held: OrderedDict[int, Content] = OrderedDict()

    def __contains__(self, prefix: int) -> bool:
        return prefix in self._held

    def keep(self, prefixes: Sequence[int], block_ids: Sequence[int]) -> list[int]:
        """Copies blocks before they are lost. Returns the prefixes given up for them."""
        for prefix, block in zip(prefixes, block_ids, strict=True):
            self._held[prefix] = self._save(block)
            self._held.move_to_end(prefix)
        return [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._count)]

    def known(self, prefixes: Sequence[int]) -> list[tuple[int, Content]]:
        """The longest run of `prefixes` that is here, whatever happens to the tier afterwards."""
        found: list[tuple[int, Content]] = []
        for prefix in prefixes:
            content = self._held.get(prefix)
            if content is None:
                break
            found.append((prefix, content))
        return found

    def restore(self, block: int, content: Content) -> None:
        """Writes what `known` found into a block of KV memory."""
        self._restore(block, content)


def open_host_tier(count: int, memory: SimMemory) -> HostTier | None:
    """One for the blocks of the memory's first group; None when it may keep none."""
    if not count:
        return None
    return HostTier(count, partial(memory.save_block, 0), partial(memory.restore_block, 0))
