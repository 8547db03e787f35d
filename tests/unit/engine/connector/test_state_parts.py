"""Heads of states in the pages of any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_engine.connector.layer_groups import (
    GATED_DELTA_NET,
    MAMBA2,
    SHORT_CONVOLUTION,
    StateArray,
    StateHeads,
    state_heads,
)
from headrace_kv.shard_map import heads_held

TAPS = 3
Bytes = NDArray[np.uint8]
Kinds = Sequence[tuple[int, int]]


def pages(
    kinds: Kinds,
    recurrent: tuple[int, int, int] | None,
    ranks: int,
    *,
    channels_first: bool,
) -> tuple[list[StateArray], list[Bytes]]:
    """The arrays of a rank, and the page of each rank, with different numbers in all elements of the model.

    `kinds`: channels of each kind over all ranks, and the heads that divide them. `recurrent`: heads over all ranks,
    and the shape of one.
    """
    total = sum(channels for channels, _ in kinds)
    taps = np.arange(TAPS * total, dtype=np.float32).reshape(TAPS, -1)
    found: list[Bytes] = []
    shapes: tuple[tuple[int, ...], ...] = ()
    for rank in range(ranks):
        mine = []
        first = 0
        for channels, head_count in kinds:
            held = heads_held(rank, ranks, head_count)
            unit = channels // head_count
            mine.append(taps[:, first + held.start * unit : first + held.stop * unit])
            first += channels
        rows = np.concatenate(mine, axis=1)
        arrays = [rows.T if channels_first else rows]
        if recurrent is not None:
            heads = np.arange(taps.size, taps.size + np.prod(recurrent), dtype=np.float32)
            share = recurrent[0] // ranks
            arrays.append(heads.reshape(recurrent)[rank * share : (rank + 1) * share])
        shapes = tuple(array.shape for array in arrays)
        page = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        found.append(np.frombuffer(page, np.uint8))
    return [StateArray(shape, "float32", 4) for shape in shapes], found


def bytes_by_head(
    found: Sequence[Bytes], divided: Sequence[StateHeads]
) -> dict[tuple[int, str, int], bytes]:
    """The bytes of each head in each part, by the position of its StateHeads. Every copy of a head is the same."""
    by_head: dict[tuple[int, str, int], bytes] = {}
    for rank, page in enumerate(found):
        read = 0
        for place, heads in enumerate(divided):
            for part in heads.parts:
                start = part.offset_bytes
                for head in heads_held(rank, len(found), heads.head_count):
                    content = page[start : start + part.unit_bytes].tobytes()
                    assert by_head.setdefault((place, part.name, head), content) == content
                    start += part.unit_bytes
                    read += part.unit_bytes
        # No byte is left out.
        assert read == len(page)
    return by_head


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "kinds", "recurrent", "groups", "head_counts"),
    [
        # Queries and keys of 4 heads of 8 channels, values of 8 heads of 16.
        (GATED_DELTA_NET, ((32, 4), (32, 4), (128, 4)), (8, 16, 8), 0, [4]),
        # 8 heads of 16 channels, in 4 groups with states of 8 channels.
        (MAMBA2, ((128, 8), (32, 4), (32, 4)), (8, 16, 8), 4, [8, 4]),
        # One group, of which each rank has a copy.
        (MAMBA2, ((128, 8), (8, 1), (8, 1)), (8, 16, 8), 1, [8, 1]),
        (SHORT_CONVOLUTION, ((96, 48),), None, 0, [48]),
    ],
)
def test_ranks_hold_the_same_heads_as_one_rank(
    kind: str,
    kinds: Kinds,
    recurrent: tuple[int, int, int] | None,
    groups: int,
    head_counts: list[int],
    ranks: int,
    channels_first: bool,
) -> None:
    by_head = []
    for count in (1, ranks):
        arrays, found = pages(kinds, recurrent, count, channels_first=channels_first)
        divided = state_heads(
            kind, arrays, ranks=count, group_count=groups, channels_first=channels_first
        )
        assert [heads.head_count for heads in divided] == head_counts
        by_head.append(bytes_by_head(found, divided))
    assert by_head[0] == by_head[1]
    assert len(set(by_head[0].values())) == len(by_head[0])


@pytest.mark.parametrize(
    ("kind", "shapes", "groups"),
    [
        # The model does not state its groups.
        (MAMBA2, ((3, 96), (4, 16, 8)), 0),
        # Two ranks of a model with 4 groups have 2 each, and not 1 or 4.
        (MAMBA2, ((3, 80), (4, 16, 8)), 4),
        (MAMBA2, ((3, 128), (4, 16, 8)), 4),
        # An odd number of channels beside the values.
        (GATED_DELTA_NET, ((3, 81), (4, 16, 8)), 0),
        # A third array, and another kind.
        (GATED_DELTA_NET, ((3, 96), (4, 16, 8), (4, 2)), 0),
        ("linear", ((4, 16, 16),), 0),
        # 80 channels have 40 heads, which 5 ranks could share, but not the 64 heads of 320 channels.
        (SHORT_CONVOLUTION, ((3, 64),), 0),
    ],
)
def test_other_pages_are_not_divided(
    kind: str, shapes: tuple[tuple[int, ...], ...], groups: int
) -> None:
    arrays = [StateArray(shape, "float32", 4) for shape in shapes]
    ranks = 5 if kind == SHORT_CONVOLUTION else 2
    found = state_heads(kind, arrays, ranks=ranks, group_count=groups, channels_first=False)
    assert found == ()
