"""Lists of byte copies between two address spaces, also of strided arrays. Pure, vectorised.

A copy is a nest of dimensions: segments (tokens inside one block on both sides), parts, heads and tokens. The nest is
expanded from the inside out. Where a dimension's strides equal the bytes that are contiguous so far, on both sides, it
makes the runs longer. Otherwise it multiplies them. Segments can differ in this: a full block of tokens joins its
heads where a partial block cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace_kv.layout import Region

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
        return int(np.add.reduce(self.lengths))

    def reverse(self) -> Runs:
        """The copies back."""
        return Runs(self.destination_addresses, self.source_addresses, self.lengths)

    def batches(self, entry_limit: int, byte_limit: int) -> Iterator[Runs]:
        """Yields parts of at most `entry_limit` runs and `byte_limit` bytes. Longer runs are split."""
        count = len(self.lengths)
        if count <= entry_limit and self.payload_bytes <= byte_limit:
            if count:
                yield self
            return
        whole = self.split(byte_limit)
        ends = np.cumsum(whole.lengths)
        start = 0
        while start < len(whole):
            sent = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, sent + byte_limit, side="right"))
            stop = min(stop, start + entry_limit)
            yield whole.select(slice(start, stop))
            start = stop

    def select(self, which: Int64Array | NDArray[np.bool_] | slice) -> Runs:
        """Some of the runs, in the order given."""
        return Runs(
            self.source_addresses[which], self.destination_addresses[which], self.lengths[which]
        )

    def split(self, byte_limit: int) -> Runs:
        """Splits the runs that are longer than `byte_limit`."""
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

    def merge(self, source_stride: int = 1, destination_stride: int = 1) -> Runs:
        """Joins runs that follow each other in the list and in memory on both sides.

        The strides are the bytes of one unit of `lengths` on each side.
        """
        if len(self) < 2:
            return self
        source, destination = self.source_addresses, self.destination_addresses
        lengths = self.lengths[:-1]
        # Short lists are most frequent, and NumPy's own differences take longer for them.
        breaks = source[1:] != source[:-1] + lengths * source_stride
        breaks |= destination[1:] != destination[:-1] + lengths * destination_stride
        firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        if len(firsts) == len(self):
            return self
        return Runs(source[firsts], destination[firsts], np.add.reduceat(self.lengths, firsts))

    def sort_and_merge(self) -> Runs:
        """Sorts by source address and joins neighbours.

        Very long lists keep their order: they hold single tokens, which have no neighbours.
        """
        source = self.source_addresses
        ordered = len(self) < 2 or bool((source[1:] >= source[:-1]).all())
        if ordered or len(self) > _SORTED_RUNS_MAX:
            return self.merge()
        return self.select(np.argsort(source)).merge()


def concatenate(parts: Sequence[Runs]) -> Runs:
    """The runs of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return Runs(
        np.concatenate([part.source_addresses for part in parts]),
        np.concatenate([part.destination_addresses for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of tokens: the start on either side, as (block, token in the block), and the token count.

    All arrays have shape [segment]. For units that are copied whole, one block counts as one token.
    """

    source_blocks: Int64Array
    source_tokens: Int64Array
    destination_blocks: Int64Array
    destination_tokens: Int64Array
    token_counts: Int64Array


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension. A stride is the bytes from one element to the next."""

    count: int
    source_stride: int
    destination_stride: int


@dataclass(frozen=True, slots=True)
class PairedPart:
    """One part on both sides, or several equal ones at the distances of `repeats`.

    Offsets count from the bases of the two memories.
    """

    source: Region
    destination: Region
    repeats: Axis = Axis(1, 0, 0)

    @property
    def token_strides(self) -> tuple[int, int]:
        """(source, destination) bytes from one token to the next; for units that are copied whole, the unit's bytes."""
        unit = self.source.unit_bytes
        return (
            self.source.token_stride_bytes or unit,
            self.destination.token_stride_bytes or unit,
        )


def pair_parts(pairs: list[tuple[Region, Region]]) -> tuple[PairedPart, ...]:
    """Pairs the parts of one layer. Joins parts that are adjacent in every token or lie at equal distances."""
    fused: list[PairedPart] = []
    for source, destination in sorted(pairs, key=lambda pair: pair[0].offset_bytes):
        part = PairedPart(source, destination)
        joined = _join_tokens(fused[-1], part) if fused else None
        if joined is not None:
            fused[-1] = joined
        else:
            fused.append(part)
    found: list[PairedPart] = []
    for part in fused:
        repeated = _repeat(found[-1], part) if found else None
        if repeated is not None:
            found[-1] = repeated
        else:
            found.append(part)
    return tuple(found)


def _join_tokens(left: PairedPart, right: PairedPart) -> PairedPart | None:
    """Both as one part if the right one follows the left one within each token on both sides, else None."""
    unit = left.source.unit_bytes
    if not left.source.token_addressable or _offsets(left, right) != (unit, unit):
        return None
    total = unit + right.source.unit_bytes
    if not _alike(left.source, right.source) or not _alike(left.destination, right.destination):
        return None
    if min(left.token_strides) < total:
        return None
    return PairedPart(
        replace(left.source, unit_bytes=total), replace(left.destination, unit_bytes=total)
    )


def _repeat(left: PairedPart, right: PairedPart) -> PairedPart | None:
    """Both as one part if they differ only in their offsets, by the step of the parts before, else None."""
    same = left.source.unit_bytes == right.source.unit_bytes
    if not same or not _alike(left.source, right.source):
        return None
    if not _alike(left.destination, right.destination):
        return None
    count = left.repeats.count
    source_step, destination_step = _offsets(left, right)
    if source_step % count or destination_step % count:
        return None
    step = Axis(count + 1, source_step // count, destination_step // count)
    if count > 1 and replace(step, count=count) != left.repeats:
        return None
    return replace(left, repeats=step)


def _offsets(left: PairedPart, right: PairedPart) -> tuple[int, int]:
    return (
        right.source.offset_bytes - left.source.offset_bytes,
        right.destination.offset_bytes - left.destination.offset_bytes,
    )


def _alike(left: Region, right: Region) -> bool:
    """Whether two regions differ at most by part, place and unit."""
    return (
        replace(right, part=left.part, offset_bytes=left.offset_bytes, unit_bytes=left.unit_bytes)
        == left
    )


def plan_part(
    part: PairedPart, source_base: int, destination_base: int, heads: Axis, segments: Segments
) -> Runs:
    """Runs of one part. The bases are the addresses of the first head to copy."""
    tokens = part.token_strides
    source = source_base + segments.source_blocks * part.source.block_stride_bytes
    source += segments.source_tokens * tokens[0]
    destination = destination_base + segments.destination_blocks * (
        part.destination.block_stride_bytes
    )
    destination += segments.destination_tokens * tokens[1]
    # Token runs that continue across a block border become one. Their lengths are counts of tokens.
    token_runs = Runs(source, destination, segments.token_counts).merge(*tokens)
    inner = sorted(
        (axis for axis in (part.repeats, heads) if axis.count > 1),
        key=lambda axis: axis.source_stride,
    )
    nest = _Nest(tokens, tuple(inner), part.source.block_stride_bytes, part.source.unit_bytes)
    return nest.expand(token_runs)


@dataclass(frozen=True, slots=True)
class _Nest:
    """The dimensions of one part. `inner` leaves out the tokens and ascends by source stride."""

    tokens: tuple[int, int]
    inner: tuple[Axis, ...]
    block_stride: int
    unit_bytes: int

    def expand(self, token_runs: Runs) -> Runs:
        """The byte runs of token runs, of which the lengths are counts of tokens."""
        lengths = np.full(len(token_runs), self.unit_bytes, dtype=np.int64)
        found: list[Runs] = []
        self._grow(token_runs, lengths, 0, False, (), found)
        return concatenate(found)

    def _grow(
        self,
        token_runs: Runs,
        lengths: Int64Array,
        depth: int,
        tokens_done: bool,
        loops: tuple[Axis, ...],
        found: list[Runs],
    ) -> None:
        """Expands the next dimension. Splits the token runs when it joins only some of them."""
        if not len(token_runs):
            return
        axis = self.inner[depth] if depth < len(self.inner) else None
        if axis is None and tokens_done:
            found.append(self._list(token_runs, lengths, loops))
            return
        if not tokens_done and (axis is None or self.tokens[0] <= axis.source_stride):
            # Dimensions inside a token treat every token run alike.
            if lengths[0] == self.tokens[0] == self.tokens[1]:
                lengths = lengths * token_runs.lengths
            else:
                token_runs, lengths = self._by_token(token_runs, lengths)
            self._grow(token_runs, lengths, depth, True, loops, found)
            return
        assert axis is not None
        joins = (lengths == axis.source_stride) & (lengths == axis.destination_stride)
        for chosen, factor, more in ((joins, axis.count, ()), (~joins, 1, (axis,))):
            if chosen.all():
                every = (token_runs, lengths * factor, depth + 1, tokens_done)
                self._grow(*every, (*loops, *more), found)
            elif chosen.any():
                some = (token_runs.select(chosen), lengths[chosen] * factor, depth + 1, tokens_done)
                self._grow(*some, (*loops, *more), found)

    def _by_token(self, token_runs: Runs, lengths: Int64Array) -> tuple[Runs, Int64Array]:
        """One token run per token."""
        counts = token_runs.lengths
        which = np.repeat(np.arange(len(token_runs)), counts)
        token = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        each = Runs(
            token_runs.source_addresses[which] + token * self.tokens[0],
            token_runs.destination_addresses[which] + token * self.tokens[1],
            np.ones(len(which), dtype=np.int64),
        )
        return each, lengths[which]

    def _list(self, token_runs: Runs, lengths: Int64Array, loops: tuple[Axis, ...]) -> Runs:
        source, destination = token_runs.source_addresses, token_runs.destination_addresses
        # Loops of more than a block's stride go outside, so that adjacent blocks stay adjacent in the list.
        within = [axis for axis in loops if axis.source_stride <= self.block_stride]
        beyond = [axis for axis in loops if axis.source_stride > self.block_stride]
        for axis in (*reversed(within), *beyond):
            steps = np.arange(axis.count, dtype=np.int64)
            outer = axis in beyond
            source = _spread(source, steps * axis.source_stride, outer)
            destination = _spread(destination, steps * axis.destination_stride, outer)
            lengths = _spread(lengths, np.zeros_like(steps), outer)
        return Runs(source, destination, lengths)


def _spread(starts: Int64Array, steps: Int64Array, outer: bool) -> Int64Array:
    if outer:
        return (steps[:, None] + starts[None, :]).ravel()
    return (starts[:, None] + steps[None, :]).ravel()
