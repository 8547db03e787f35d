"""Reference counts of KV blocks, and the cached prefixes that they hold."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from headrace_common.callers.priority import Priority


class FreeRuns:
    """Free ids among 0 to `count`, at first all of them.

    A pool has few runs beside its blocks, so each change costs far less than a scan of all blocks.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        """How many ids are free."""
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # (length, start) of each run, in order.
        self._by_length: list[tuple[int, int]] = []
        if count:
            self._add_run(0, count)

    def ids(self) -> tuple[int, ...]:
        """The free ids in ascending order."""
        return tuple(
            block for start, end in sorted(self._end_of.items()) for block in range(start, end)
        )

    def take(self, count: int) -> list[int]:
        """Removes and returns ids: from the start of the shortest run that has enough, the lowest of equal ones.

        Without such a run, the ids come from the longest runs. There must be `count` free ids.
        """
        assert count <= self.count
        if not count:
            return []
        place = bisect_left(self._by_length, (count, 0))
        if place < len(self._by_length):
            return self._take_start(self._by_length[place][1], count)
        taken: list[int] = []
        for length, start in sorted(self._by_length, key=lambda run: (-run[0], run[1])):
            taken += self._take_start(start, min(length, count - len(taken)))
            if len(taken) == count:
                break
        return taken

    def add(self, block_ids: Sequence[int]) -> None:
        """Frees distinct ids that are not free."""
        ordered = sorted(block_ids)
        start = 0
        for index in range(1, len(ordered) + 1):
            if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
                self._add_between(ordered[start], ordered[index - 1] + 1)
                start = index
        self.count += len(ordered)

    def _take_start(self, start: int, count: int) -> list[int]:
        end = self._remove_run(start)
        if start + count < end:
            self._add_run(start + count, end)
        self.count -= count
        return list(range(start, start + count))

    def _add_between(self, start: int, end: int) -> None:
        """Adds ids, joined with the runs before and after them."""
        before = self._start_of.get(start)
        if before is not None:
            self._remove_run(before)
            start = before
        if end in self._end_of:
            end = self._remove_run(end)
        self._add_run(start, end)

    def _add_run(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        insort(self._by_length, (end - start, start))

    def _remove_run(self, start: int) -> int:
        """Returns the run's end."""
        end = self._end_of.pop(start)
        del self._start_of[end]
        del self._by_length[bisect_left(self._by_length, (end - start, start))]
        return end


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

    def find(self, prefix: int) -> int | None:
        """The block that has a prefix."""
        return self._block_of.get(prefix)

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
        """Adds a holder, a request of class `priority`, to blocks that are held or that `find_cached` returned."""
        for block in block_ids:
            if self._holders[block] == 0:
                self._idle.remove(block)
            self._holders[block] += 1
            cached = self._cached.get(block)
            if cached is not None and priority < cached.priority:
                self._cached[block] = replace(cached, priority=priority)

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
