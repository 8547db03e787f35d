"""In which shards blocks lie in a remote pool, and what a rank copies out of the shards of other workers. Pure.

A worker saves a block as one object for each shard of its heads. Ranks that hold copies of the same heads have one
object. So a block that workers of `tensor_parallel_size` have saved has as many objects in each stage as there are
different shards. This *shard count* is the tensor-parallel size, up to the number of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from headrace_kv.layout.layout import KvLayout, RankMemory
from headrace_kv.plan.copy_plan import BlockSpan, CopyPlanner
from headrace_kv.plan.runs import Runs, concatenate
from headrace_kv.plan.shard_map import WHOLE_BLOCKS, Edge, heads_held, place_regions, shards


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Copies `count` pieces of `nbytes` from offset `source` to offset `destination` of two blocks.

    The strides are the bytes from one piece to the next.
    """

    source: int
    destination: int
    nbytes: int
    count: int
    source_stride: int
    destination_stride: int


_EVERY_COUNT_MAX: Final = 8
_COUNT_MAX: Final = 32


def shard_counts(layout: KvLayout) -> tuple[int, ...]:
    """The shard counts that a worker looks for, with its own first.

    These are all counts up to 8, and up to 32 those that divide the heads evenly. Engines use no other ones.
    """
    heads = layout.kv_head_count
    own = min(layout.tensor_parallel_size, heads)
    known = (
        count
        for count in range(1, min(heads, _COUNT_MAX) + 1)
        if count <= _EVERY_COUNT_MAX or heads % count == 0
    )
    return (own, *(count for count in known if count != own))


@lru_cache(maxsize=1024)
def saved_shards(head_count: int, shard_count: int) -> tuple[range, ...]:
    """The heads of each shard. Raises LayoutMismatch as `shards` does."""
    return tuple(shard.heads for shard in shards(shard_count, head_count))


def heads_of_rank(layout: KvLayout, rank: int) -> range:
    """The heads that a rank holds."""
    size = layout.tensor_parallel_size
    return heads_held(rank % size, size, layout.kv_head_count)


def copies_of_rank(layout: KvLayout, rank: int) -> tuple[int, int]:
    """Which of the copies of its heads a rank holds, and how many copies its stage has."""
    size = layout.tensor_parallel_size
    heads = heads_of_rank(layout, rank)
    (shard,) = (one for one in shards(size, layout.kv_head_count) if one.heads == heads)
    return rank % size - shard.first_rank, shard.copies


def shards_read(layout: KvLayout, rank: int, shard_count: int) -> tuple[range, ...]:
    """The shards of a block that a rank reads, each with one of its heads at least."""
    return tuple(
        heads
        for heads in saved_shards(layout.kv_head_count, shard_count)
        if _common(heads, heads_of_rank(layout, rank))
    )


def readable_shards(layout: KvLayout, rank: int) -> tuple[range, ...]:
    """All shards of all shard counts that a rank may read, with its own first."""
    found = {heads_of_rank(layout, rank): None}
    for count in shard_counts(layout):
        found.update(dict.fromkeys(shards_read(layout, rank, count)))
    return tuple(found)


def shard_block_bytes(layout: KvLayout, rank: int, heads: range) -> int:
    """Bytes of a block of the rank's stage with these heads. See `plan_shard_read`."""
    return _place(layout, rank, heads).arena_bytes


def plan_shard_read(layout: KvLayout, rank: int, heads: range) -> tuple[StridedCopy, ...]:
    """Copies what a rank holds of the heads of a shard, from a block of this shard into a block of the rank.

    Both blocks have all layers of the stage, in the order WHOLE_BLOCKS. `heads` is one of `readable_shards`.
    """
    own = heads_of_rank(layout, rank)
    common = _common(heads, own)
    edge = Edge(rank, rank, common.start - heads.start, common.start - own.start, len(common))
    planner = CopyPlanner(_place(layout, rank, heads), _place(layout, rank, own))
    zero = np.zeros(1, np.int64)
    span = BlockSpan(0, layout.block_tokens, zero, 0, zero, 0)
    layers = [layer for layer in layout.groups[0].layers if layer in layout.layers_of(rank)]
    return strided_copies(concatenate([planner.plan(edge, layer, span) for layer in layers]))


def strided_copies(runs: Runs) -> tuple[StridedCopy, ...]:
    """The runs as few strided copies: runs of equal length that follow each other at equal distances are one."""
    found: list[StridedCopy] = []
    for length in np.unique(runs.lengths).tolist():
        equal = runs.lengths == length
        pairs = zip(
            *(
                addresses[equal].tolist()
                for addresses in (runs.source_addresses, runs.destination_addresses)
            ),
            strict=True,
        )
        found += _strided(list(pairs), length)
    return tuple(found)


def _strided(pairs: list[tuple[int, int]], nbytes: int) -> Iterator[StridedCopy]:
    start = 0
    while start < len(pairs):
        stride, stop = _stride(pairs, start), start + 1
        while stop < len(pairs) and _stride(pairs, stop - 1) == stride:
            stop += 1
        yield StridedCopy(*pairs[start], nbytes, stop - start, *stride)
        start = stop


def _stride(pairs: list[tuple[int, int]], index: int) -> tuple[int, int]:
    """The distances from one pair to the next; zeros behind the last one."""
    if index + 1 == len(pairs):
        return 0, 0
    (source, destination), (next_source, next_destination) = pairs[index : index + 2]
    return next_source - source, next_destination - destination


def _common(left: range, right: range) -> range:
    return range(max(left.start, right.start), min(left.stop, right.stop))


def _place(layout: KvLayout, rank: int, heads: range) -> RankMemory:
    """A block of the rank's stage with some heads, at address 0."""
    (group,) = layout.groups
    alone = replace(layout, tensor_parallel_size=1, groups=(replace(group, head_count=len(heads)),))
    stage = rank // layout.tensor_parallel_size
    placed = place_regions(alone, stage, (1,), WHOLE_BLOCKS)
    return RankMemory(rank, "", "", 0, placed.arena_bytes, placed.regions)
