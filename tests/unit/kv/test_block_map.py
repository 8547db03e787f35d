"""Planned runs against a naive copy over real memory, with random layouts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace_common.errors import LayoutMismatch, ProtocolViolation
from headrace_kv.block_map import CopyPlanner, Runs, plan_runs
from headrace_kv.layout import RankMemory, Region
from headrace_kv.shard_map import Edge, edges, shards

BLOCKS = 9


@dataclass
class Side:
    arena: NDArray[np.uint8]
    memory: RankMemory

    def cell(self, region: Region, block: int, head: int) -> slice:
        start = (
            region.offset_bytes
            + block * region.block_stride_bytes
            + head * region.head_stride_bytes
        )
        return slice(start, start + region.head_bytes)


def make_side(rank: int, heads: int, parts: dict[str, int], data: st.DataObject) -> Side:
    """One rank with a region per part, blocks or heads outermost, with gaps or without."""
    regions = []
    offset = 0
    for part, head_bytes in parts.items():
        gap = data.draw(st.sampled_from([0, 0, 5]))
        padding = data.draw(st.sampled_from([0, 0, 3]))
        if data.draw(st.booleans()):
            head_stride = head_bytes + gap
            block_stride = heads * head_stride + padding
            size = BLOCKS * block_stride
        else:
            block_stride = head_bytes + gap
            head_stride = BLOCKS * block_stride + padding
            size = heads * head_stride
        regions.append(Region(0, part, offset, block_stride, head_stride, head_bytes))
        offset += size + data.draw(st.sampled_from([0, 7]))
    arena = np.zeros(offset, dtype=np.uint8)
    memory = RankMemory(rank, "in_memory", "s", arena.ctypes.data, offset, BLOCKS, tuple(regions))
    return Side(arena, memory)


def copy(runs: Runs) -> None:
    for source, destination, length in zip(
        runs.source_addresses, runs.destination_addresses, runs.lengths, strict=True
    ):
        ctypes.memmove(int(destination), int(source), int(length))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_runs_copy_what_a_naive_loop_copies(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([1, 2, 4, 6]))
    sizes = [size for size in (1, 2, 3, 4, 6, 12) if size % heads == 0 or heads % size == 0]
    prefill_tp, decode_tp = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sizes))
    parts = data.draw(st.sampled_from([{"kv": 16}, {"k": 8, "v": 8}, {"k": 4, "v": 12}]))
    count = data.draw(st.integers(0, BLOCKS))
    ids = st.permutations(range(BLOCKS)) if data.draw(st.booleans()) else st.just(range(BLOCKS))
    source_ids = list(data.draw(ids))[:count]
    destination_ids = list(data.draw(ids))[:count]
    sources, destinations = (
        [make_side(rank, heads // shards(tp, heads)[0], parts, data) for rank in range(tp)]
        for tp in (prefill_tp, decode_tp)
    )
    rng = np.random.default_rng(1)
    for side in sources:
        side.arena[:] = rng.integers(1, 256, side.arena.shape, dtype=np.uint8)
    expected = [side.arena.copy() for side in destinations]
    for edge in edges(prefill_tp, decode_tp, heads, 0, "x"):
        source, destination = sources[edge.source_rank], destinations[edge.destination_rank]
        for ours, theirs in zip(source.memory.regions, destination.memory.regions, strict=True):
            for from_block, to_block in zip(source_ids, destination_ids, strict=True):
                for index in range(edge.head_count):
                    to_cell = destination.cell(theirs, to_block, edge.destination_head + index)
                    from_cell = source.cell(ours, from_block, edge.source_head + index)
                    expected[edge.destination_rank][to_cell] = source.arena[from_cell]
        runs = plan_runs(source.memory, destination.memory, edge, 0, source_ids, destination_ids)
        assert runs.payload_bytes == count * edge.head_count * sum(parts.values())
        for batch in runs.batches(entry_limit=3, byte_limit=50):
            assert len(batch) <= 3
            assert batch.payload_bytes <= 50
            copy(batch)
    for side, whole in zip(destinations, expected, strict=True):
        assert np.array_equal(side.arena, whole)


def packed(heads: int, blocks: int = 8, head_bytes: int = 10) -> RankMemory:
    stride = heads * head_bytes
    regions = tuple(
        Region(0, part, index * blocks * stride, stride, head_bytes, head_bytes)
        for index, part in enumerate(("k", "v"))
    )
    return RankMemory(0, "in_memory", "s", 1000, 2 * blocks * stride, blocks, regions)


def test_neighbours_are_merged() -> None:
    whole = Edge(0, 0, 0, 0, 4)
    runs = plan_runs(packed(4), packed(4), whole, 0, [1, 2, 3, 5], [4, 5, 6, 7])
    assert runs.lengths.tolist() == [120, 40, 120, 40]
    half = plan_runs(packed(4), packed(4), Edge(0, 0, 2, 0, 2), 0, [1, 2], [1, 2])
    assert half.lengths.tolist() == [20] * 4
    # All blocks of k end where those of v begin.
    everything = plan_runs(packed(4), packed(4), whole, 0, range(8), range(8))
    assert everything.lengths.tolist() == [640]


def test_a_plan_moves_between_layers() -> None:
    """Layer 1 lies elsewhere, layer 2 in another order of parts, layer 3 outside the arena."""

    def memory(base: int, order: tuple[int, ...]) -> RankMemory:
        regions = tuple(
            Region(layer, part, offset, 20, 10, 10)
            for layer, pair in enumerate(((0, 100), (300, 400), order, (900, 1000)))
            for part, offset in zip(("k", "v"), pair, strict=True)
        )
        return RankMemory(0, "in_memory", "s", base, 1000, 5, regions)

    source, destination = memory(5000, (700, 600)), memory(9000, (500, 750))
    planner = CopyPlanner(source, destination)
    edge = Edge(0, 0, 1, 0, 1)
    source_blocks, destination_blocks = np.array([1, 4]), np.array([0, 3])
    for layer in (0, 1, 2, 0):
        runs = planner.plan(edge, layer, source_blocks, destination_blocks)
        fresh = plan_runs(source, destination, edge, layer, [1, 4], [0, 3])
        assert runs.source_addresses.tolist() == fresh.source_addresses.tolist()
        assert runs.destination_addresses.tolist() == fresh.destination_addresses.tolist()
        assert runs.lengths.tolist() == fresh.lengths.tolist()
    with pytest.raises(ProtocolViolation, match="leave the source arena"):
        planner.plan(edge, 3, source_blocks, destination_blocks)


def test_impossible_copies_are_refused() -> None:
    edge = Edge(0, 0, 0, 0, 4)
    with pytest.raises(ProtocolViolation, match="destination block 8"):
        plan_runs(packed(4), packed(4), edge, 0, [1], [8])
    with pytest.raises(ProtocolViolation, match="source block -1"):
        plan_runs(packed(4), packed(4), edge, 0, [-1], [1])
    with pytest.raises(ProtocolViolation, match="leave the destination arena"):
        plan_runs(packed(4), replace(packed(4), arena_bytes=600), edge, 0, [7], [7])
    with pytest.raises(ProtocolViolation, match="cannot be paired"):
        plan_runs(packed(4), packed(4), edge, 0, [1, 2], [1])
    with pytest.raises(LayoutMismatch, match="head_bytes"):
        plan_runs(packed(4), packed(4, head_bytes=8), edge, 0, [1], [1])
    partless = replace(packed(4), regions=packed(4).regions[:1])
    with pytest.raises(LayoutMismatch, match="layer 0 part v"):
        plan_runs(packed(4), partless, edge, 0, [1], [1])
    with pytest.raises(LayoutMismatch, match="layer 3 has no region"):
        plan_runs(packed(4), packed(4), edge, 3, [1], [1])
