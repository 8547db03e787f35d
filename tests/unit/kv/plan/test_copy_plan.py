"""Planned runs of chosen cases: how few they are, and which copies are rejected."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.errors import LayoutMismatch, ProtocolViolation
from headrace_kv.copy_plan import BlockSpan, CopyPlanner, Runs
from headrace_kv.layout import KvLayout, RankMemory
from headrace_kv.shard_map import HEAD_OUTER, Dimension, Edge, place_regions

BLOCK_TOKENS = 4
UNIT = 10


def memory(
    heads: int = 4,
    order: tuple[Dimension, ...] = HEAD_OUTER,
    *,
    blocks: int = 8,
    block_tokens: int = BLOCK_TOKENS,
    parts: dict[str, int] | None = None,
    block_format: str = "token_outer",
    layers: int = 1,
) -> RankMemory:
    layout = KvLayout.attention(
        model="m",
        dtype="uint8",
        layer_count=layers,
        kv_head_count=heads,
        block_tokens=block_tokens,
        parts=parts or {"k": UNIT, "v": UNIT},
        block_format=block_format,
    )
    placed = place_regions(layout, 0, (blocks,), order)
    return RankMemory(0, "in_memory", "s", 1000, placed.arena_bytes, placed.regions)


def plan_runs(
    source: RankMemory, destination: RankMemory, edge: Edge, layer: int, chosen: BlockSpan
) -> Runs:
    return CopyPlanner(source, destination).plan(edge, layer, chosen)


def span(
    source: list[int], destination: list[int], start: int = 0, end: int | None = None
) -> BlockSpan:
    """Blocks from the one that holds `start` on, with equal block sizes."""
    first = start - start % BLOCK_TOKENS
    end = first + len(source) * BLOCK_TOKENS if end is None else end
    arrays = (np.array(source, dtype=np.int64), np.array(destination, dtype=np.int64))
    return BlockSpan(start, end, arrays[0], first, arrays[1], first)


def lengths(
    source: RankMemory, destination: RankMemory, edge: Edge, chosen: BlockSpan
) -> list[int]:
    return list(map(int, plan_runs(source, destination, edge, 0, chosen).lengths))


WHOLE = Edge(0, 0, 0, 0, 4)
HEAD = BLOCK_TOKENS * UNIT


def test_neighbours_are_merged() -> None:
    scattered = span([1, 2, 3, 5], [4, 5, 6, 7])
    assert lengths(memory(), memory(), WHOLE, scattered) == [12 * HEAD, 4 * HEAD] * 2
    half = Edge(0, 0, 2, 0, 2)
    assert lengths(memory(), memory(), half, span([1, 2], [1, 2])) == [2 * HEAD] * 4
    # All blocks of k end where those of v begin.
    everything = span(list(range(8)), list(range(8)))
    assert lengths(memory(), memory(), WHOLE, everything) == [64 * HEAD]


def test_runs_grow_with_fragments_not_tokens() -> None:
    for blocks in (8, 64, 512):
        one = memory(1, blocks=blocks)
        everything = span(list(range(blocks)), list(range(blocks)), 1)
        assert len(plan_runs(one, one, Edge(0, 0, 0, 0, 1), 0, everything)) == 2


def test_only_the_latest_plans_are_kept() -> None:
    planner = CopyPlanner(memory(), memory())
    spans = [span([1], [1]) for _ in range(100)]
    first_blocks = weakref.ref(spans[0].source_blocks)
    for chosen in spans:
        planner.plan(WHOLE, 0, chosen)
    del chosen
    spans.clear()
    assert first_blocks() is None


def test_only_shared_layers_are_planned() -> None:
    both = memory(layers=3)
    first = replace(both, regions=both.regions[:4])
    last = replace(both, regions=both.regions[2:])
    planner = CopyPlanner(first, last)
    assert len(planner.plan(WHOLE, 1, span([1], [1])))
    for layer in (0, 2, 3):
        with pytest.raises(LayoutMismatch, match=f"do not both hold layer {layer}"):
            planner.plan(WHOLE, layer, span([1], [1]))


def test_impossible_copies_are_rejected() -> None:
    one = memory()
    with pytest.raises(ProtocolViolation, match="destination block 8"):
        plan_runs(one, one, WHOLE, 0, span([1], [8]))
    with pytest.raises(ProtocolViolation, match="source block -1"):
        plan_runs(one, one, WHOLE, 0, span([-1], [1]))
    with pytest.raises(ProtocolViolation, match="leave the destination arena"):
        plan_runs(one, replace(one, arena_bytes=600), WHOLE, 0, span([7], [7]))
    with pytest.raises(ProtocolViolation, match="1 destination blocks do not hold"):
        plan_runs(one, one, WHOLE, 0, span([1, 2], [1]))
    with pytest.raises(LayoutMismatch, match=r"unit_bytes \(10 != 8\)"):
        plan_runs(one, memory(parts={"k": 8, "v": 8}), WHOLE, 0, span([1], [1]))
    partless = replace(one, regions=one.regions[:1])
    with pytest.raises(LayoutMismatch, match="layer 0 part v"):
        plan_runs(one, partless, WHOLE, 0, span([1], [1]))
    with pytest.raises(LayoutMismatch, match="heads 2 to 5"):
        plan_runs(one, one, Edge(0, 0, 2, 0, 4), 0, span([1], [1]))
    opaque = memory(block_format="packed")
    with pytest.raises(LayoutMismatch, match="token_addressable"):
        plan_runs(one, opaque, WHOLE, 0, span([1], [1]))
    with pytest.raises(LayoutMismatch, match=r"block_tokens \(4 != 8\)"):
        plan_runs(opaque, memory(block_format="packed", block_tokens=8), WHOLE, 0, span([1], [1]))
    with pytest.raises(ProtocolViolation, match="start inside a block of 4"):
        plan_runs(opaque, opaque, WHOLE, 0, span([1, 2], [1, 2], 1))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 90)), max_size=12),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_batches_keep_every_byte_and_both_limits(
    sizes: list[tuple[int, int]], entry_limit: int, byte_limit: int
) -> None:
    sources = np.array([source for source, _ in sizes], dtype=np.int64)
    runs = Runs(sources, sources + 7, np.array([size for _, size in sizes], dtype=np.int64))
    copied: list[tuple[int, int]] = []
    for batch in runs.batches(entry_limit, byte_limit):
        assert 0 < len(batch) <= entry_limit
        assert batch.payload_bytes <= byte_limit
        for source, destination, length in zip(
            batch.source_addresses, batch.destination_addresses, batch.lengths, strict=True
        ):
            copied += [(source + at, destination + at) for at in range(length)]
    assert copied == [
        (source + at, source + 7 + at) for source, size in sizes for at in range(size)
    ]
