"""Heads of states in the pages of any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_engine.vllm.state_parts import (
    GATED_DELTA_NET,
    MAMBA2,
    SHORT_CONVOLUTION,
    StateArray,
    StateHeads,
    state_heads,
)

TAPS = 3
Bytes = NDArray[np.uint8]


def pages(
    kinds: Sequence[int],
    recurrent: tuple[int, int, int] | None,
    ranks: int,
    *,
    channels_first: bool,
) -> tuple[list[StateArray], list[Bytes]]:
    """The arrays of a rank, and the page of each rank, with different numbers in all elements of the model.

    `kinds`: channels of each kind over all ranks. `recurrent`: heads over all ranks, and the shape of one.
    """
    count = TAPS * sum(kinds)
    taps = np.arange(count, dtype=np.float32).reshape(TAPS, -1)
    found: list[Bytes] = []
    shape: tuple[int, ...] = ()
    for rank in range(ranks):
        mine = []
        first = 0
        for channels in kinds:
            share = channels // ranks
            mine.append(taps[:, first + rank * share : first + (rank + 1) * share])
            first += channels
        rows = np.concatenate(mine, axis=1)
        convolution = np.ascontiguousarray(rows.T if channels_first else rows)
        shape = convolution.shape
        page = convolution.tobytes()
        if recurrent is not None:
            heads = np.arange(count, count + np.prod(recurrent), dtype=np.float32)
            share = recurrent[0] // ranks
            mine_too = heads.reshape(recurrent)[rank * share : (rank + 1) * share]
            page += np.ascontiguousarray(mine_too).tobytes()
        found.append(np.frombuffer(page, np.uint8))
    arrays = [StateArray(shape, "float32", 4)]
    if recurrent is not None:
        arrays.append(StateArray((recurrent[0] // ranks, *recurrent[1:]), "float32", 4))
    return arrays, found


def heads_of(page: Bytes, heads: StateHeads, ranks: int) -> list[dict[str, bytes]]:
    """The bytes of each head of a rank, by part."""
    return [
        {
            part.name: page[start : start + part.unit_bytes].tobytes()
            for part in heads.parts
            for start in [part.offset_bytes + head * part.unit_bytes]
        }
        for head in range(heads.head_count // ranks)
    ]


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "kinds", "recurrent", "groups", "head_count"),
    [
        # Queries and keys of 4 heads of 8 channels, values of 8 heads of 16.
        (GATED_DELTA_NET, (32, 32, 128), (8, 16, 8), 0, 4),
        # 8 heads of 16 channels, in 4 groups with states of 8 channels.
        (MAMBA2, (128, 32, 32), (8, 16, 8), 4, 4),
        (SHORT_CONVOLUTION, (96,), None, 0, 48),
    ],
)
def test_ranks_hold_the_same_heads_as_one_rank(
    kind: str,
    kinds: tuple[int, ...],
    recurrent: tuple[int, int, int] | None,
    groups: int,
    head_count: int,
    ranks: int,
    channels_first: bool,
) -> None:
    divided: list[list[dict[str, bytes]]] = []
    for count in (1, ranks):
        arrays, found = pages(kinds, recurrent, count, channels_first=channels_first)
        heads = state_heads(
            kind, arrays, ranks=count, group_count=groups, channels_first=channels_first
        )
        assert heads is not None
        assert heads.head_count == head_count
        divided.append([one for page in found for one in heads_of(page, heads, count)])
        # No byte is left out.
        assert sum(map(len, divided[-1][0].values())) * head_count // count == len(found[0])
    assert divided[0] == divided[1]
    assert len({tuple(sorted(one.items())) for one in divided[0]}) == head_count


@pytest.mark.parametrize(
    ("kind", "shapes", "groups"),
    [
        # One group, of which each rank has a copy.
        (MAMBA2, ((3, 80), (4, 16, 8)), 1),
        # The model does not state its groups.
        (MAMBA2, ((3, 96), (4, 16, 8)), 0),
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
    assert found is None
