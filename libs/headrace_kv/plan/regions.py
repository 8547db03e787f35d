"""Places the regions of one rank's arena, for any order of their dimensions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from headrace_common.errors import ConfigError
from headrace_kv.layout.layout import (
    STATE,
    TOKEN_OUTER,
    CacheGroup,
    KvLayout,
    Part,
    Region,
)
from headrace_kv.plan.shard_map import heads_held

Dimension = Literal["layer", "part", "block", "head", "token"]

HEAD_OUTER: Final[tuple[Dimension, ...]] = ("layer", "part", "block", "head", "token")
"""[layer][K|V][block][head][token]: consecutive heads are one slice of a block ("HND")."""
TOKENS_OUTER: Final[tuple[Dimension, ...]] = ("layer", "part", "block", "token", "head")
"""[layer][K|V][block][token][head]: the heads of a token are adjacent ("NHD")."""
WHOLE_BLOCKS: Final[tuple[Dimension, ...]] = ("block", "layer", "part", "head", "token")
"""[block][layer][K|V][head][token]: each block with all its layers is in one piece."""


@dataclass(frozen=True, slots=True)
class PlacedRegions:
    """Regions, by group, layer and part, in an arena of `arena_bytes`."""

    regions: tuple[Region, ...]
    arena_bytes: int


def place_regions(
    layout: KvLayout,
    rank: int,
    block_counts: Sequence[int],
    order: Sequence[Dimension] = HEAD_OUTER,
    align_bytes: int = 1,
) -> PlacedRegions:
    """Places a rank's regions in one arena, group after group. `order` lists the dimensions from the outermost in.

    `block_counts` are by group. Units that are copied whole have no token dimension. Raises ConfigError for an order
    that does not name every dimension once, or too few block counts.
    """
    if sorted(order) != sorted(HEAD_OUTER) or len(block_counts) != len(layout.groups):
        raise ConfigError(
            f"an arena cannot be laid out as {'/'.join(order)} with {len(block_counts)} block counts",
            metadata={"field": "order"},
        )
    held_layers = layout.layers_of(rank)
    regions: list[Region] = []
    offset = 0
    for group, block_count in zip(layout.groups, block_counts, strict=True):
        layers = [layer for layer in group.layers if layer in held_layers]
        heads = heads_held(
            rank % layout.tensor_parallel_size, layout.tensor_parallel_size, group.head_count
        )
        offset = -(-offset // align_bytes) * align_bytes
        placed, offset = _place_group(group, layers, len(heads), block_count, order, offset)
        regions += placed
    return PlacedRegions(tuple(regions), offset)


def _place_group(
    group: CacheGroup,
    layers: Sequence[int],
    head_count: int,
    block_count: int,
    order: Sequence[Dimension],
    offset: int,
) -> tuple[list[Region], int]:
    """Regions of one group from `offset` on, and the offset of its end."""
    counts = {"layer": len(layers), "block": block_count, "head": head_count}
    sizes = {part.name: part.unit_bytes for part in group.parts}
    strides: dict[str, dict[str, int]] = {part.name: {} for part in group.parts}
    starts = dict.fromkeys(sizes, 0)
    for dimension in reversed(order):
        if dimension == "part":
            total = 0
            for part in group.parts:
                starts[part.name] = total
                total += sizes[part.name]
            sizes = dict.fromkeys(sizes, total)
            continue
        for part in group.parts:
            strides[part.name][dimension] = sizes[part.name]
            sizes[part.name] *= counts.get(dimension, _tokens(group, part))
    total = max(sizes.values())
    regions = [
        Region(
            layer=layer,
            part=part.name,
            offset_bytes=offset + starts[part.name] + index * strides[part.name]["layer"],
            block_count=block_count,
            head_count=head_count,
            block_tokens=group.block_tokens,
            unit_bytes=part.unit_bytes,
            block_stride_bytes=strides[part.name]["block"],
            head_stride_bytes=strides[part.name]["head"],
            token_stride_bytes=(strides[part.name]["token"] if _addressable(group, part) else 0),
        )
        for index, layer in enumerate(layers)
        for part in group.parts
    ]
    return regions, offset + total


def _addressable(group: CacheGroup, part: Part) -> bool:
    return group.kind != STATE and part.block_format == TOKEN_OUTER


def _tokens(group: CacheGroup, part: Part) -> int:
    return group.block_tokens if _addressable(group, part) else 1
