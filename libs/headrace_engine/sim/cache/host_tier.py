"""Blocks that were evicted from the engine's KV memory and kept in main memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from headrace_engine.sim.cache.blocks import longest_run
from headrace_engine.sim.cache.memory import SimMemory
from headrace_engine.sim.model.model import WordArray

BlockContent = tuple[WordArray, ...]
"""A block's bytes: a copy for each array of the KV memory that holds a part of it."""


class HostTier:
    """Up to `count` blocks by their prefix; the oldest is evicted first.

    `save` copies a block out of KV memory and `restore` back into it.
    """

    def __init__(
        self,
        count: int,
        save: Callable[[int], BlockContent],
        restore: Callable[[int, BlockContent], None],
    ) -> None:
        self._count = count
        self._save = save
        self._restore = restore
        self._blocks: OrderedDict[int, BlockContent] = OrderedDict()

    def __contains__(self, prefix: int) -> bool:
        return prefix in self._blocks

    def offload(self, prefixes: Sequence[int], block_ids: Sequence[int]) -> list[int]:
        """Copies blocks out of KV memory. Returns the prefixes that were evicted for them."""
        for prefix, block in zip(prefixes, block_ids, strict=True):
            self._blocks[prefix] = self._save(block)
            self._blocks.move_to_end(prefix)
        return [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._count)]

    def find(self, prefixes: Sequence[int]) -> list[BlockContent]:
        """The longest run of `prefixes` that is here. Later evictions do not change the result."""
        return longest_run(self._blocks, prefixes)

    def load(self, block: int, content: BlockContent) -> None:
        """Writes a result of `find` into a block of KV memory."""
        self._restore(block, content)


def open_host_tier(count: int, memory: SimMemory) -> HostTier | None:
    """A tier for the blocks of the memory's first group; None when `count` is 0."""
    if not count:
        return None
    return HostTier(count, partial(memory.save_block, 0), partial(memory.restore_block, 0))
