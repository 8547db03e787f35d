"""What a rank copies out of blocks that workers of another tensor-parallel size have saved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace_kv.layout.layout import TOKEN_OUTER, TOKENS, CacheGroup, KvLayout, Part
from headrace_kv.plan.runs import Runs
from headrace_kv.plan.saved_shards import (
    StridedCopy,
    copies_of_rank,
    heads_of_rank,
    plan_shard_read,
    readable_shards,
    saved_shards,
    shard_block_bytes,
    shard_counts,
    shards_read,
    strided_copies,
)
from headrace_kv.plan.shard_map import WHOLE_BLOCKS, heads_held, place_regions

GROUP = CacheGroup("g", (0, 1, 2), TOKENS, 4, 2, (Part("k", "uint8", 3), Part("v", "uint8", 2)))
LAYOUT = KvLayout("m", 2, (GROUP,))

Cell = tuple[int, str, int, int, int]
"""(layer, part, model head, token, byte) that a byte of a block holds."""


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    """Any model with one kind of cache; also MLA, scales beside other parts, and parts that are copied whole."""
    names = draw(st.sampled_from([("kv",), ("k", "v"), ("nope", "rope"), ("k", "v", "k_scale")]))
    opaque = draw(st.booleans())
    parts = tuple(
        Part(
            name,
            "uint8",
            1 if name in ("rope", "k_scale") else draw(st.integers(1, 4)),
            "packed" if opaque and name != "k_scale" else TOKEN_OUTER,
        )
        for name in names
    )
    layer_count = draw(st.integers(1, 4))
    heads, tokens = draw(st.sampled_from([1, 2, 3, 4, 6, 8])), draw(st.integers(1, 4))
    group = CacheGroup("g", tuple(range(layer_count)), TOKENS, heads, tokens, parts)
    stages = (0, draw(st.integers(1, layer_count - 1))) if layer_count > 1 else (0,)
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    return KvLayout("m", size, (group,), draw(st.sampled_from([(0,), stages])))


def cells(layout: KvLayout, rank: int) -> dict[int, Cell]:
    """What each byte of a rank's block holds."""
    (group,) = layout.groups
    heads = heads_held(
        rank % layout.tensor_parallel_size, layout.tensor_parallel_size, group.head_count
    )
    found: dict[int, Cell] = {}
    for region in place_regions(layout, rank, (1,), WHOLE_BLOCKS).regions:
        tokens = region.block_tokens if region.token_addressable else 1
        for head in range(region.head_count):
            for token in range(tokens):
                start = (
                    region.offset_bytes
                    + head * region.head_stride_bytes
                    + token * region.token_stride_bytes
                )
                for byte in range(region.unit_bytes):
                    cell = (region.layer, region.part, heads[head], token, byte)
                    assert start + byte not in found
                    found[start + byte] = cell
    return found


def writers(layout: KvLayout) -> dict[tuple[int, range], int]:
    """A rank that saves each shard, by stage and heads."""
    return {
        (rank // layout.tensor_parallel_size, heads_of_rank(layout, rank)): rank
        for rank in range(layout.rank_count)
    }


@given(layouts(), st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
def test_every_byte_of_a_block_comes_once_from_the_same_byte(
    layout: KvLayout, saved_size: int
) -> None:
    saved = replace(layout, tensor_parallel_size=saved_size)
    saved_by = writers(saved)
    count = shard_counts(saved)[0]
    assert count in shard_counts(layout)
    for rank in range(layout.rank_count):
        wanted = cells(layout, rank)
        landed: dict[int, Cell] = {}
        for heads in shards_read(layout, rank, count):
            assert heads in readable_shards(layout, rank)
            source = cells(saved, saved_by[rank // layout.tensor_parallel_size, heads])
            assert shard_block_bytes(layout, rank, heads) == len(source)
            for one in plan_shard_read(layout, rank, heads):
                for piece in range(one.count):
                    for byte in range(one.nbytes):
                        at = one.destination + piece * one.destination_stride + byte
                        assert at not in landed
                        landed[at] = source[one.source + piece * one.source_stride + byte]
        assert landed == wanted


@given(layouts())
def test_each_shard_has_one_writer_among_the_copies_of_its_heads(layout: KvLayout) -> None:
    for prefix in range(4):
        written = [
            (rank // layout.tensor_parallel_size, heads_of_rank(layout, rank))
            for rank in range(layout.rank_count)
            for copy, copies in [copies_of_rank(layout, rank)]
            if prefix % copies == copy
        ]
        shards = saved_shards(layout.kv_head_count, shard_counts(layout)[0])
        stages = range(len(layout.stage_starts))
        assert sorted(written, key=str) == sorted(
            ((stage, heads) for stage in stages for heads in shards), key=str
        )


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 3)), max_size=12))
def test_strided_copies_are_the_same_bytes(runs: list[tuple[int, int, int]]) -> None:
    columns = (np.array([run[at] for run in runs], np.int64) for at in range(3))
    copies = strided_copies(Runs(*columns))
    assert sorted(runs) == sorted(
        (
            one.source + piece * one.source_stride,
            one.destination + piece * one.destination_stride,
            one.nbytes,
        )
        for one in copies
        for piece in range(one.count)
    )


def test_equal_parts_of_all_layers_are_one_strided_copy() -> None:
    group = replace(GROUP, parts=(Part("k", "uint8", 3), Part("v", "uint8", 3)))
    layout = replace(LAYOUT, groups=(group,))
    # Heads 2 and 3 of all four, of 2 tokens with 3 bytes.
    assert plan_shard_read(layout, 1, range(4)) == (StridedCopy(12, 0, 12, 6, 24, 12),)
