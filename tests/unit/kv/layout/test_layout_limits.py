"""A layout beyond all bounds is rejected before its counts are iterated."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from headrace.kv.v1 import layout_pb2
from headrace_common.errors import LayoutMismatch
from headrace_kv.layout import (
    KvDescriptor,
    KvLayout,
    RankMemory,
    descriptor_from_proto,
    descriptor_to_proto,
    layout_from_proto,
    layout_to_proto,
)
from headrace_kv.shard_map import place_regions
from headrace_registry.validation import descriptor_violations, layout_violations

MOST = 2**32 - 1
LAYOUT = KvLayout.attention(
    model="m", dtype="float32", layer_count=2, kv_head_count=2, block_tokens=16, parts={"kv": 4}
)


def many_ranks(layout: layout_pb2.KvLayout) -> None:
    layout.tensor_parallel_size = MOST


def no_ranks(layout: layout_pb2.KvLayout) -> None:
    layout.tensor_parallel_size = 0


def many_stages(layout: layout_pb2.KvLayout) -> None:
    layout.tensor_parallel_size = 1_000
    layout.stage_starts[:] = range(1_000)


def many_heads(layout: layout_pb2.KvLayout) -> None:
    layout.groups[0].head_count = MOST


def many_layers(layout: layout_pb2.KvLayout) -> None:
    layout.groups[0].layers.extend(range(100_000))


def no_window_blocks(layout: layout_pb2.KvLayout) -> None:
    layout.groups[0].window_tokens, layout.groups[0].block_tokens = 64, 0


@pytest.mark.parametrize(
    "spoil", [many_ranks, no_ranks, many_stages, many_heads, many_layers, no_window_blocks]
)
def test_workers_and_registry_reject_a_layout_beyond_all_bounds_fast(
    spoil: Callable[[layout_pb2.KvLayout], None],
) -> None:
    layout = layout_to_proto(LAYOUT)
    assert layout_from_proto(layout) == LAYOUT
    assert layout_violations(layout, "layout") == {}
    spoil(layout)
    started_s = time.process_time()
    with pytest.raises(LayoutMismatch, match="exceeds a limit"):
        layout_from_proto(layout)
    assert layout_violations(layout, "layout")
    assert descriptor_violations(layout_pb2.KvDescriptor(layout=layout), "descriptor")
    assert time.process_time() - started_s < 1.0


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"layer": 2}, "none of the 2 layers"),
        ({"block_count": 0}, "has no blocks"),
        ({"unit_bytes": 0}, "units of 0 bytes"),
        ({"block_tokens": 0}, "blocks of 0 tokens"),
        ({"offset_bytes": 2**40}, "ends outside the memory"),
        ({"block_stride_bytes": 2**40}, "ends outside the memory"),
    ],
)
def test_a_descriptor_with_impossible_memory_is_rejected(
    changes: dict[str, int], fault: str
) -> None:
    placed = place_regions(LAYOUT, 0, (4,))
    memory = RankMemory(0, "tcp", "10.0.0.7:1", 1 << 32, placed.arena_bytes, placed.regions)
    descriptor = descriptor_to_proto(KvDescriptor(LAYOUT, (memory,)))
    assert descriptor_from_proto(descriptor).ranks == (memory,)
    for name, value in changes.items():
        setattr(descriptor.ranks[0].regions[1], name, value)
    with pytest.raises(LayoutMismatch, match=fault):
        descriptor_from_proto(descriptor)
    descriptor.ranks[0].base_address = 2**64 - 1
    with pytest.raises(LayoutMismatch):
        descriptor_from_proto(descriptor)
