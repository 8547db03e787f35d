"""Splits lists of runs into few segments of equal runs, for a device's copy kernels. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace_common.errors import TransferFailed
from headrace_kv.plan.runs import Int64Array

_WORD_BYTES = 8


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Runs of `length` bytes at `offsets` in span number `span`. Packed, they start at `packed_offset`."""

    span: int
    offsets: Int64Array
    length: int
    packed_offset: int


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Packed bytes [start, stop) that go through the buffer at once. With `direct`, one long run without the buffer."""

    start: int
    stop: int
    segments: tuple[Segment, ...]
    direct: bool


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """`count` rows of `words` words of `word_bytes` in a span, from `first_word` on and `step` words apart.

    `index` selects rows.
    """

    word_bytes: int
    words: int
    first_word: int
    step: int
    count: int
    index: Int64Array


def cut(
    spans: Sequence[tuple[int, int]], addresses: Int64Array, lengths: Int64Array
) -> Iterator[Segment]:
    """Segments of neighbouring runs that have one length and lie in one span [start, end). Drops empty runs.

    `spans` are sorted and do not overlap. Raises TransferFailed for a run outside all spans.
    """
    filled = lengths > 0
    if not filled.all():
        addresses, lengths = addresses[filled], lengths[filled]
    if not len(lengths):
        return
    starts = np.array([start for start, _ in spans], np.int64)
    ends = np.array([end for _, end in spans], np.int64)
    held = np.searchsorted(starts, addresses, side="right") - 1
    if not len(spans) or bool((held < 0).any() or (addresses + lengths > ends[held]).any()):
        raise TransferFailed("an address is not in the registered device memory")
    breaks = np.flatnonzero((np.diff(lengths) != 0) | (np.diff(held) != 0)) + 1
    packed_offset, first = 0, 0
    for stop in (*breaks.tolist(), len(lengths)):
        span, length = int(held[first]), int(lengths[first])
        yield Segment(span, addresses[first:stop] - starts[span], length, packed_offset)
        packed_offset += (stop - first) * length
        first = stop


def batch(segments: Iterator[Segment], buffer_bytes: int, direct_bytes: int) -> Iterator[Batch]:
    """Batches that fill the buffer. Runs of `direct_bytes` or more go alone. direct_bytes <= buffer_bytes."""
    waiting: list[Segment] = []
    start = stop = 0
    for segment in segments:
        length = segment.length
        first = 0
        while first < len(segment.offsets):
            direct = length >= direct_bytes
            room = 0 if direct else (buffer_bytes - (stop - start)) // length
            if room == 0 and waiting:
                yield Batch(start, stop, tuple(waiting), direct=False)
                waiting, start = [], stop
                continue
            count = 1 if direct else min(room, len(segment.offsets) - first)
            part = Segment(segment.span, segment.offsets[first : first + count], length, stop)
            first += count
            stop += count * length
            if direct:
                yield Batch(start, stop, (part,), direct=True)
                start = stop
            else:
                waiting.append(part)
    if waiting:
        yield Batch(start, stop, tuple(waiting), direct=False)


def rows_of(segment: Segment, buffer_offset: int) -> Rows:
    """The segment as rows of the widest words that it and its place in the buffer are aligned to."""
    low = int(segment.offsets.min())
    moved = segment.offsets - low
    apart = int(np.gcd.reduce(moved))
    word_bytes = int(np.gcd.reduce([_WORD_BYTES, low, apart, segment.length, buffer_offset]))
    words = segment.length // word_bytes
    step = apart // word_bytes or words
    if step % words == 0:
        # Rows that do not overlap need the fewest words of index.
        step = words
    index = moved // (step * word_bytes)
    return Rows(word_bytes, words, low // word_bytes, step, int(index.max()) + 1, index)
