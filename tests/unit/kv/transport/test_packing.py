"""Gather and scatter against plain slices; ranges and sessions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace_kv.copy_plan import Int64Array
from headrace_kv.transport.base import join_sessions, session_of
from headrace_kv.transport.memory import MemoryRanges, gather, scatter


@st.composite
def places(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Offsets and lengths of runs that do not overlap, in any order."""
    lengths = draw(st.lists(st.sampled_from([1, 3, 8, 8, 8, 64]), min_size=1, max_size=30))
    gaps = draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    offsets, position = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        offsets.append(position + gap)
        position += gap + length
    order = draw(st.permutations(range(len(lengths))))
    return [offsets[i] for i in order], [lengths[i] for i in order]


@given(places())
def test_gather_then_scatter(found: tuple[list[int], list[int]]) -> None:
    offsets, lengths = found
    size = sum(lengths) + 10 * len(lengths)
    source = np.random.default_rng(1).integers(1, 256, size, np.uint8)
    packed = np.zeros(sum(lengths), np.uint8)
    addresses: Int64Array = np.array(offsets, np.int64) + source.ctypes.data
    gather(addresses, np.array(lengths, np.int64), packed)
    expected = [source[o : o + n] for o, n in zip(offsets, lengths, strict=True)]
    assert np.array_equal(packed, np.concatenate(expected))
    target = np.zeros(size, np.uint8)
    scatter(packed, addresses - source.ctypes.data + target.ctypes.data, np.array(lengths))
    mask = np.zeros(size, bool)
    for offset, length in zip(offsets, lengths, strict=True):
        mask[offset : offset + length] = True
    assert np.array_equal(target, np.where(mask, source, 0))


def test_runs_may_lie_in_several_ranges() -> None:
    ranges = MemoryRanges()
    ranges.add(0, 10)
    ranges.add(100, 10)
    lengths = np.array([5, 5])
    assert ranges.covers(np.array([5, 105]), lengths)
    assert not ranges.covers(np.array([5, 106]), lengths)


def test_the_part_of_a_transport_is_found_in_a_session() -> None:
    inner = join_sessions({"mooncake": "h:1", "scatter": "h:2/ab"})
    outer = join_sessions({"other": "a.b", "mooncake": inner})
    assert session_of("other", outer) == "a.b"
    assert session_of("mooncake", outer) == "h:1"
    assert session_of("scatter", outer) == "h:2/ab"
    assert session_of("other", inner) is None
    assert session_of("mooncake", "h:1") == "h:1"
