"""Reference counts of KV blocks, and the cached prefixes that they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from headrace_kv.manager.free_runs import FreeRuns


class BlockPool:
    """Blocks 0 to `count`. A cached block without a holder stays cached until the block is needed.

    `on_cleared` gets blocks with void content. Before that, `on_evicted` gets the prefixes that
    are no longer cached, and the blocks that still hold them.
    """

    def __init__(
        self,
        count: int,
        on_cleared: Callable[[Sequence[int]], None],
        on_evicted: Callable[[Sequence[int], Sequence[int]], None] | None = None,
    ) -> None:
        self.count = count
        self._on_cleared = on_cleared
        self._on_evicted = on_evicted
        self._holders = [0] * count
        self._free = FreeRuns(count)
        self._block_of: dict[int, int] = {}
        self._prefix_of: dict[int, int] = {}
        # Cached blocks without a holder, the next one to evict in front.
        self._idle: OrderedDict[int, None] = OrderedDict()

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

    def share(self, block_ids: Sequence[int]) -> None:
        """Adds a holder to blocks that `find_cached` returned."""
        for block in block_ids:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

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

    def register(self, block: int, prefix: int) -> bool:
        """Caches a held, complete block; False when it or another block is registered already."""
        if prefix in self._block_of or block in self._prefix_of:
            return False
        self._block_of[prefix] = block
        self._prefix_of[block] = prefix
        return True

    def free(self, block_ids: Sequence[int]) -> None:
        """Takes a holder from each block. The last blocks of a prompt are evicted first."""
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

    def evict_idle(self) -> None:
        """Evicts every cached block without a holder."""
        self._evict(len(self._idle))

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Removes blocks from the cache without a report, because their content is lost. Returns their prefixes."""
        prefixes: list[int] = []
        cleared: list[int] = []
        for block in block_ids:
            prefix = self._prefix_of.pop(block, None)
            if prefix is None:
                continue
            del self._block_of[prefix]
            prefixes.append(prefix)
            if not self._holders[block]:
                del self._idle[block]
                cleared.append(block)
        self._clear(cleared)
        return prefixes

    def _evict(self, count: int) -> None:
        blocks = [self._idle.popitem(last=False)[0] for _ in range(count)]
        prefixes = [self._prefix_of.pop(block) for block in blocks]
        for prefix in prefixes:
            del self._block_of[prefix]
        if self._on_evicted is not None:
            self._on_evicted(prefixes, blocks)
        self._clear(blocks)

    def _clear(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._free.add(block_ids)
            self._on_cleared(block_ids)
