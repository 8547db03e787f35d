"""Runs as uniform pieces, against plain slices; no torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import TransferFailed
from headrace_engine.torch_memory.device_memory import Segment, batch, cut, rows_of

SPANS = ((1000, 3000), (3000, 4000), (9000, 20_000))


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Addresses and lengths of runs within the spans; they may overlap, as copies out of memory may."""
    addresses, lengths = [], []
    for _ in range(draw(st.integers(0, 30))):
        low, high = draw(st.sampled_from(SPANS))
        length = draw(st.sampled_from([0, 1, 8, 8, 8, 24, 400]))
        align = draw(st.sampled_from([1, 8]))
        addresses.append(low + draw(st.integers(0, (high - low - length) // align)) * align)
        lengths.append(length)
    return addresses, lengths


@given(runs(), st.sampled_from([100, 401, 4096]))
def test_batches_fill_the_buffer_with_the_runs_in_order(
    found: tuple[list[int], list[int]], buffer_bytes: int
) -> None:
    memory = np.random.default_rng(1).integers(1, 256, 20_000, np.uint8)
    addresses, lengths = found
    packed = np.zeros(sum(lengths), np.uint8)
    end = 0
    segments = cut(SPANS, np.array(addresses, np.int64), np.array(lengths, np.int64))
    for part in batch(segments, buffer_bytes, 100):
        assert part.start == end
        end = part.stop
        assert part.direct or part.stop - part.start <= buffer_bytes
        assert not part.direct or part.stop - part.start >= 100
        for segment in part.segments:
            start = SPANS[segment.span][0]
            for number, offset in enumerate(segment.offsets.tolist()):
                position = segment.packed_offset + number * segment.length
                assert part.start <= position <= part.stop - segment.length
                source = memory[start + offset : start + offset + segment.length]
                packed[position : position + segment.length] = source
    assert end == sum(lengths)
    slices = [memory[a : a + n] for a, n in zip(addresses, lengths, strict=True)]
    assert np.array_equal(packed, np.concatenate([np.empty(0, np.uint8), *slices]))


@pytest.mark.parametrize(
    "address, length", [(999, 8), (2999, 2), (3996, 5), (8999, 1), (19_999, 2)]
)
def test_a_run_outside_is_refused(address: int, length: int) -> None:
    with pytest.raises(TransferFailed):
        list(cut(SPANS, np.array([9000, address]), np.array([1, length])))
    with pytest.raises(TransferFailed):
        list(cut((), np.array([address]), np.array([length])))


def segment_of(offsets: list[int], length: int) -> Segment:
    return Segment(0, np.array(offsets, np.int64), length, 0)


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=20),
    st.integers(1, 64),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 9),
)
def test_rows_start_where_the_runs_do(
    offsets: list[int], length: int, align: int, buffer_offset: int
) -> None:
    segment = segment_of([offset * align for offset in offsets], length * align)
    rows = rows_of(segment, buffer_offset * align)
    assert rows.words * rows.word_bytes == segment.length
    assert buffer_offset * align % rows.word_bytes == 0
    firsts = (rows.first_word + rows.index * rows.step) * rows.word_bytes
    assert firsts.tolist() == segment.offsets.tolist()
    assert rows.count == int(rows.index.max()) + 1


def test_blocks_are_copied_in_wide_words() -> None:
    blocks = rows_of(segment_of([4096 * 7, 4096 * 2, 4096 * 9], 1024), 512)
    assert (blocks.word_bytes, blocks.words, blocks.first_word) == (8, 128, 1024)
    # The step is a whole number of rows: they do not overlap.
    assert blocks.step == blocks.words
    odd = rows_of(segment_of([16, 49], 16), 0)
    assert (odd.word_bytes, odd.step, odd.index.tolist()) == (1, 33, [0, 1])
