"""Lists of byte copies between two address spaces. Pure, vectorised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

_SORTED_RUNS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte copies: `lengths` bytes each. Three int64 arrays of shape [run]."""

    source_addresses: Int64Array
    destination_addresses: Int64Array
    lengths: Int64Array

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.lengths.sum())

    def reverse(self) -> Runs:
        """The copies back."""
        return Runs(self.destination_addresses, self.source_addresses, self.lengths)

    def batches(self, entry_limit: int, byte_limit: int) -> Iterator[Runs]:
        """Yields parts of at most `entry_limit` runs and `byte_limit` bytes. Longer runs are split."""
        if len(self) <= entry_limit and self.payload_bytes <= byte_limit:
            if len(self):
                yield self
            return
        whole = self._split(byte_limit)
        ends = np.cumsum(whole.lengths)
        start = 0
        while start < len(whole):
            sent = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, sent + byte_limit, side="right"))
            stop = min(stop, start + entry_limit)
            yield Runs(
                whole.source_addresses[start:stop],
                whole.destination_addresses[start:stop],
                whole.lengths[start:stop],
            )
            start = stop

    def _split(self, byte_limit: int) -> Runs:
        pieces = -(-self.lengths // byte_limit)
        if not np.any(pieces > 1):
            return self
        run = np.repeat(np.arange(len(self)), pieces)
        offset = (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * byte_limit
        return Runs(
            self.source_addresses[run] + offset,
            self.destination_addresses[run] + offset,
            np.minimum(self.lengths[run] - offset, byte_limit),
        )

    def merge(self) -> Runs:
        """Joins runs that follow each other in the list and in memory on both sides."""
        if len(self) < 2:
            return self
        lengths = self.lengths[:-1]
        breaks = (np.diff(self.source_addresses) != lengths) | (
            np.diff(self.destination_addresses) != lengths
        )
        firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        if len(firsts) == len(self):
            return self
        return Runs(
            self.source_addresses[firsts],
            self.destination_addresses[firsts],
            np.add.reduceat(self.lengths, firsts),
        )

    def sort_and_merge(self) -> Runs:
        """Sorts by source address and joins neighbours.

        Very long lists keep their order: they hold single tokens, which have no neighbours.
        """
        ordered = len(self) < 2 or bool((np.diff(self.source_addresses) >= 0).all())
        if ordered or len(self) > _SORTED_RUNS_MAX:
            return self.merge()
        order = np.argsort(self.source_addresses)
        return Runs(
            self.source_addresses[order], self.destination_addresses[order], self.lengths[order]
        ).merge()


def concatenate(parts: Sequence[Runs]) -> Runs:
    """The runs of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return Runs(
        np.concatenate([part.source_addresses for part in parts]),
        np.concatenate([part.destination_addresses for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


def interleave(parts: Sequence[Runs]) -> Runs:
    """The first runs of all parts, then the second ones, and so on. Parts of unequal sizes are concatenated."""
    every = concatenate(parts)
    if len({len(part) for part in parts}) > 1:
        return every
    order = np.arange(len(every)).reshape(len(parts), -1).T.ravel()
    return Runs(
        every.source_addresses[order], every.destination_addresses[order], every.lengths[order]
    )
