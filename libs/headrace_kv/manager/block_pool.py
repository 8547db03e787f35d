"""Reference counts of KV blocks, and the cached prefixes that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from headrace_common.callers.priority import Priority
from headrace_kv.manager.free_runs import FreeRuns
from headrace_kv.manager.idle_blocks import IdleBlocks


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block with the hash of its prefix, and the highest class of the requests that have used it."""

    prefix: int
    block: int
    priority: Priority = Priority.NORMAL


class BlockPool:
    """Blocks 0 to `count`. A cached block without a holder stays cached until the block is needed.

    Blocks that low requests use are needed first: see IdleBlocks. `on_cleared` gets blocks with void content. Before
    that, `on_evicted` gets the blocks that are no longer cached, and still have their content.
    """

    def __init__(
        self,
        count: int,
        on_cleared: Callable[[Sequence[int]], None],
        on_evicted: Callable[[Sequence[CachedBlock]], None] | None = None,
    ) -> None:
        self.count = count
        self._on_cleared = on_cleared
        self._on_evicted = on_evicted
        self._holders = [0] * count
        self._free = FreeRuns(count)
        self._block_of: dict[int, int] = {}
        # By block.
        self._cached: dict[int, CachedBlock] = {}
        self._idle = IdleBlocks(count)

    @property
    def available_count(self) -> int:
        """Blocks without a holder."""
        return self._free.count + len(self._idle)

    def free_ids(self) -> tuple[int, ...]:
        """Blocks with neither a holder nor a cached prefix."""
        return self._free.ids()

    def find_cached(self, prefixes: Sequence[int]) -> list[int]:
        """Blocks of the longest cached run of `prefixes`, the prefix hashes of consecutive blocks."""
        found: list[int] = []
        for prefix in prefixes:
            block = self._block_of.get(prefix)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, block_ids: Sequence[int], priority: Priority = Priority.NORMAL) -> None:
        """Adds a holder, a request of class `priority`, to blocks that `find_cached` returned."""
        for block in block_ids:
            if self._holders[block] == 0:
                self._idle.remove(block)
            self._holders[block] += 1
            if priority < self._cached[block].priority:
                self._cached[block] = replace(self._cached[block], priority=priority)

    def allocate(self, count: int) -> list[int] | None:
        """New blocks with one holder, contiguous where possible; None when there are too few."""
        if count > self.available_count:
            return None
        if count > self._free.count:
            self._evict(count - self._free.count)
        chosen = self._free.take(count)
        for block in chosen:
            self._holders[block] = 1
        return chosen

    def register(self, block: int, prefix: int, priority: Priority = Priority.NORMAL) -> bool:
        """Caches a held, complete block; False when it or another block is registered already."""
        if prefix in self._block_of or block in self._cached:
            return False
        self._block_of[prefix] = block
        self._cached[block] = CachedBlock(prefix, block, priority)
        return True

    def free(self, block_ids: Sequence[int]) -> None:
        """Takes a holder from each block. The last blocks of a prompt are evicted first."""
        cleared: list[int] = []
        for block in reversed(block_ids):
            assert self._holders[block] > 0
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            cached = self._cached.get(block)
            if cached is not None:
                self._idle.add(block, cached.priority)
            else:
                cleared.append(block)
        self._clear(cleared)

    def evict_idle(self) -> None:
        """Evicts every cached block without a holder."""
        self._evict(len(self._idle))

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Removes blocks from the cache without a report, because their content is lost. Returns their prefixes."""
        prefixes: list[int] = []
        cleared: list[int] = []
        for block in block_ids:
            cached = self._cached.pop(block, None)
            if cached is None:
                continue
            del self._block_of[cached.prefix]
            prefixes.append(cached.prefix)
            if not self._holders[block]:
                self._idle.remove(block)
                cleared.append(block)
        self._clear(cleared)
        return prefixes

    def _evict(self, count: int) -> None:
        evicted = [self._cached.pop(self._idle.pop()) for _ in range(count)]
        for one in evicted:
            del self._block_of[one.prefix]
        if self._on_evicted is not None:
            self._on_evicted(evicted)
        self._clear([one.block for one in evicted])

    def _clear(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._free.add(block_ids)
            self._on_cleared(block_ids)
