"""Plans the byte runs that copy one edge of one layer. Pure, vectorised.

Runs are as long as both memories allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from headrace_common.errors import LayoutMismatch, ProtocolViolation
from headrace_common.tasks import Recent
from headrace_kv.layout import RankMemory, Region
from headrace_kv.runs import (
    Axis,
    Int64Array,
    PairedPart,
    Runs,
    Segments,
    concatenate,
    pair_parts,
    plan_part,
)
from headrace_kv.shard_map import Edge

__all__ = ["BlockSpan", "CopyPlanner", "Int64Array", "Runs"]

_PLAN_CACHE_SIZE = 64


@dataclass(frozen=True, eq=False, slots=True)
class BlockSpan:
    """Tokens [start_token, end_token) and the blocks that hold them on either side.

    `source_blocks[i]` starts with token source_first_token + i * the source's block_tokens. The destination's blocks
    are numbered alike. Neither array changes afterwards. The block lists of a state have one page each.
    """

    start_token: int
    end_token: int
    source_blocks: Int64Array
    source_first_token: int
    destination_blocks: Int64Array
    destination_first_token: int
    _segments: dict[tuple[int, int, bool], Segments] = field(default_factory=dict, init=False)
    """A cache by (source block_tokens, destination block_tokens, token_addressable), shared by all ranks' planners."""

    def has_tokens(self, start_token: int, end_token: int) -> bool:
        """Whether the span is exactly [start_token, end_token)."""
        return self.start_token == start_token and self.end_token == end_token

    def segments(self, source: Region, destination: Region) -> Segments:
        """The tokens, cut at the block borders of both sides."""
        key = (source.block_tokens, destination.block_tokens, source.token_addressable)
        found = self._segments.get(key)
        if found is None:
            whole = not source.token_addressable
            found = _whole_blocks(source, self) if whole else _cut(source, destination, self)
            self._segments[key] = found
        return found


class CopyPlanner:
    """Plans copies from one rank's memory into another's. Made once per pair of ranks and reused.

    Most layers differ only in their offsets. For the same BlockSpan object, such a layer's plan is that of another
    layer, moved. Raises LayoutMismatch when the regions of a shared layer do not pair up.
    """

    def __init__(self, source: RankMemory, destination: RankMemory) -> None:
        self._source = source
        self._destination = destination
        self._layers = _pair_regions(source, destination)
        self._cached_plans: Recent[tuple[Edge, int, int], _Plan] = Recent(_PLAN_CACHE_SIZE)

    def plan(self, edge: Edge, layer: int, span: BlockSpan) -> Runs:
        """Runs that copy the edge's heads of the span's tokens in every part of a layer.

        Raises ProtocolViolation when a block or token lies outside its region, LayoutMismatch when a head does or one
        side does not hold the layer.
        """
        found = self._layers.get(layer)
        if found is None:
            raise LayoutMismatch(
                f"ranks {self._source.rank} and {self._destination.rank} do not both hold layer {layer}",
                metadata={"layer": str(layer)},
            )
        # The cached plan references its span, so that the id cannot be reused.
        key = (edge, id(span), found.shape)
        plan = self._cached_plans.get(key)
        if plan is None:
            bases = (self._source.base_address, self._destination.base_address)
            plan = _Plan(found, span, _plan_layer(found, bases, edge, span))
            self._cached_plans[key] = plan
        return plan.moved_to(found)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's parts on both sides. Layers of equal `shape` differ only in the offsets."""

    parts: tuple[PairedPart, ...]
    shape: int
    source_offset: int
    destination_offset: int


class _Plan:
    """The runs of one layer, which can be moved to another layer of the same shape."""

    def __init__(self, layer: _Layer, span: BlockSpan, runs: Runs) -> None:
        self._layer = layer
        self._span = span
        self._runs = runs

    def moved_to(self, layer: _Layer) -> Runs:
        source_move = layer.source_offset - self._layer.source_offset
        destination_move = layer.destination_offset - self._layer.destination_offset
        if not source_move and not destination_move:
            return self._runs
        return Runs(
            self._runs.source_addresses + source_move,
            self._runs.destination_addresses + destination_move,
            self._runs.lengths,
        )


def _pair_regions(source: RankMemory, destination: RankMemory) -> dict[int, _Layer]:
    ours, theirs = _by_layer(source, "source"), _by_layer(destination, "destination")
    shapes: dict[tuple[PairedPart, ...], int] = {}
    layers: dict[int, _Layer] = {}
    for layer in sorted(ours.keys() & theirs.keys()):
        odd = sorted(ours[layer].keys() ^ theirs[layer].keys())
        if odd:
            named = ", ".join(f"layer {layer} part {part}" for part in odd)
            raise LayoutMismatch(f"only one side's memory has {named}", metadata={"regions": named})
        pairs = [(region, theirs[layer][part]) for part, region in ours[layer].items()]
        for pair in pairs:
            _check_pair(*pair)
        parts = pair_parts(pairs)
        offsets = (parts[0].source.offset_bytes, parts[0].destination.offset_bytes)
        shape = tuple(_with_relative_offsets(part, offsets) for part in parts)
        layers[layer] = _Layer(parts, shapes.setdefault(shape, len(shapes)), *offsets)
    return layers


def _by_layer(memory: RankMemory, side: str) -> dict[int, dict[str, Region]]:
    found: dict[int, dict[str, Region]] = {}
    for region in memory.regions:
        if region.end_bytes > memory.arena_bytes:
            raise ProtocolViolation(
                f"layer {region.layer} part {region.part} would leave the {side} arena of rank {memory.rank}: "
                "its regions do not fit its arena_bytes",
                metadata={"side": side, "rank": str(memory.rank)},
            )
        found.setdefault(region.layer, {})[region.part] = region
    return found


def _check_pair(ours: Region, theirs: Region) -> None:
    """Raises LayoutMismatch when the regions' units differ."""
    differences = {
        name: f"{left} != {right}"
        for name, left, right in (
            ("unit_bytes", ours.unit_bytes, theirs.unit_bytes),
            ("token_addressable", ours.token_addressable, theirs.token_addressable),
        )
        if left != right
    }
    if not ours.token_addressable and ours.block_tokens != theirs.block_tokens:
        differences["block_tokens"] = f"{ours.block_tokens} != {theirs.block_tokens}"
    if differences:
        named = ", ".join(f"{name} ({values})" for name, values in differences.items())
        raise LayoutMismatch(
            f"layer {ours.layer} part {ours.part} differs in {named}", metadata=differences
        )


def _with_relative_offsets(part: PairedPart, offsets: tuple[int, int]) -> PairedPart:
    source, destination = part.source, part.destination
    return replace(
        part,
        source=replace(source, layer=0, offset_bytes=source.offset_bytes - offsets[0]),
        destination=replace(
            destination, layer=0, offset_bytes=destination.offset_bytes - offsets[1]
        ),
    )


def _plan_layer(layer: _Layer, bases: tuple[int, int], edge: Edge, span: BlockSpan) -> Runs:
    planned = []
    for part in layer.parts:
        source, destination = part.source, part.destination
        _check_heads(edge.source_head, edge.head_count, source, "source")
        _check_heads(edge.destination_head, edge.head_count, destination, "destination")
        segments = span.segments(source, destination)
        _check_blocks(segments.source_blocks, source, "source")
        _check_blocks(segments.destination_blocks, destination, "destination")
        source_head = edge.source_head * source.head_stride_bytes
        destination_head = edge.destination_head * destination.head_stride_bytes
        heads = Axis(edge.head_count, source.head_stride_bytes, destination.head_stride_bytes)
        planned.append(
            plan_part(
                part,
                bases[0] + source.offset_bytes + source_head,
                bases[1] + destination.offset_bytes + destination_head,
                heads,
                segments,
            )
        )
    return concatenate(planned).sort_and_merge()


def _cut(source: Region, destination: Region, span: BlockSpan) -> Segments:
    start, end = span.start_token, span.end_token
    grids = {
        (first % tokens, tokens)
        for first, tokens in (
            (span.source_first_token, source.block_tokens),
            (span.destination_first_token, destination.block_tokens),
        )
    }
    inner = [
        np.arange(start + 1 + (phase - start - 1) % tokens, end, tokens, dtype=np.int64)
        for phase, tokens in grids
    ]
    cuts = np.concatenate(([start], inner[0] if len(inner) == 1 else np.union1d(*inner), [end]))
    starts = cuts[:-1]
    source_index, source_tokens = np.divmod(starts - span.source_first_token, source.block_tokens)
    destination_index, destination_tokens = np.divmod(
        starts - span.destination_first_token, destination.block_tokens
    )
    return Segments(
        _pick(span.source_blocks, source_index, "source"),
        source_tokens,
        _pick(span.destination_blocks, destination_index, "destination"),
        destination_tokens,
        cuts[1:] - starts,
    )


def _whole_blocks(region: Region, span: BlockSpan) -> Segments:
    """Whole blocks, or the page of a state, as units."""
    source_first = destination_first = 0
    count = min(1, span.end_token - span.start_token)
    if region.block_tokens:
        source_first, rest = divmod(span.start_token - span.source_first_token, region.block_tokens)
        destination_first, other = divmod(
            span.start_token - span.destination_first_token, region.block_tokens
        )
        if rest or other:
            raise ProtocolViolation(
                f"tokens from {span.start_token} on start inside a block of {region.block_tokens}, "
                "which may only be copied whole"
            )
        count = -(-(span.end_token - span.start_token) // region.block_tokens)
    index = np.arange(count, dtype=np.int64)
    zeros = np.zeros_like(index)
    return Segments(
        _pick(span.source_blocks, source_first + index, "source"),
        zeros,
        _pick(span.destination_blocks, destination_first + index, "destination"),
        zeros,
        np.ones_like(index),
    )


def _pick(blocks: Int64Array, index: Int64Array, side: str) -> Int64Array:
    if len(index) and (index[0] < 0 or index[-1] >= len(blocks)):
        raise ProtocolViolation(
            f"{len(blocks)} {side} blocks do not hold the tokens to be copied",
            metadata={"side": side},
        )
    return blocks[index]


def _check_blocks(blocks: Int64Array, region: Region, side: str) -> None:
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= region.block_count):
        wrong = blocks[(blocks < 0) | (blocks >= region.block_count)][0]
        raise ProtocolViolation(
            f"{side} block {wrong} is not one of the {region.block_count} blocks of layer {region.layer}",
            metadata={"block": str(wrong), "side": side},
        )


def _check_heads(first: int, count: int, region: Region, side: str) -> None:
    if first < 0 or first + count > region.head_count:
        raise LayoutMismatch(
            f"{side} heads {first} to {first + count - 1} are not all among the {region.head_count} that layer "
            f"{region.layer} part {region.part} has on this rank",
            metadata={"side": side, "head_count": str(region.head_count)},
        )
