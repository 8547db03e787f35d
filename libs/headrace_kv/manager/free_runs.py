"""The free blocks of a pool, as runs of consecutive ids. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


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
