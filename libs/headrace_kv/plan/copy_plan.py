"""From (edge, layer, tokens, block lists) to the longest contiguous byte runs. Pure, vectorised."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np

from headrace_common.errors import LayoutMismatch, ProtocolViolation
from headrace_kv.layout.layout import RankMemory, Region
from headrace_kv.plan.runs import Int64Array, Runs, concatenate
from headrace_kv.plan.shard_map import Edge
from headrace_kv.plan.strided_copy import Axis, PairedPart, Segments, pair_parts, plan_part

__all__ = ["CopyPlanner", "Int64Array", "Runs", "Span", "plan_runs"]

_PLANS_REMEMBERED = 64


@dataclass(frozen=True, eq=False, slots=True)
class Span:
    """Tokens [start_token, end_token) and the blocks that hold them on either side.

    `source_blocks[i]` holds tokens from source_first_token + i * the source's block_tokens on, and likewise on the
    destination; neither array is changed afterwards. A state's block lists have one page each.
    """

    start_token: int
    end_token: int
    source_blocks: Int64Array
    source_first_token: int
    destination_blocks: Int64Array
    destination_first_token: int
    segments: dict[tuple[int, int, bool], Segments] = field(default_factory=dict, init=False)
    """By block sizes: the planners of several ranks cut one span alike."""

    def covers(self, start_token: int, end_token: int) -> bool:
        """Whether these are its tokens."""
        return self.start_token == start_token and self.end_token == end_token


class CopyPlanner:
    """Plans copies from one rank's memory into another's; made once per pair and reused.

    Layers mostly differ by where they start: then a plan for the same span (the very same object) is moved instead of
    made again. Layers that only one side holds are no copies. Raises LayoutMismatch when the regions of a shared layer
    do not pair up.
    """

    def __init__(self, source: RankMemory, destination: RankMemory) -> None:
        self._source = source
        self._destination = destination
        self._layers = _pair_regions(source, destination)
        self._recent: OrderedDict[tuple[Edge, int, int], _Plan] = OrderedDict()

    def plan(self, edge: Edge, layer: int, span: Span) -> Runs:
        """Runs that copy the edge's heads of the span's tokens in every part of a layer.

        Raises ProtocolViolation when a block, head or token lies outside its region.
        """
        found = self._layers.get(layer)
        if found is None:
            raise LayoutMismatch(
                f"ranks {self._source.rank} and {self._destination.rank} do not both hold layer {layer}",
                metadata={"layer": str(layer)},
            )
        # A remembered plan holds its span, so no other object can have its id.
        key = (edge, id(span), found.shape)
        plan = self._recent.get(key)
        if plan is None:
            bases = (self._source.base_address, self._destination.base_address)
            plan = _Plan(found, span, _plan_layer(found, bases, edge, span))
            self._recent[key] = plan
            if len(self._recent) > _PLANS_REMEMBERED:
                self._recent.popitem(last=False)
        return plan.at(found)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's parts on both sides. Layers of equal `shape` are the same but for the offsets."""

    parts: tuple[PairedPart, ...]
    shape: int
    source_offset: int
    destination_offset: int


class _Plan:
    """Runs of one layer that can be moved to another of the same shape."""

    def __init__(self, layer: _Layer, span: Span, runs: Runs) -> None:
        self._layer = layer
        self._span = span
        self._runs = runs

    def at(self, layer: _Layer) -> Runs:
        source_move = layer.source_offset - self._layer.source_offset
        destination_move = layer.destination_offset - self._layer.destination_offset
        if not source_move and not destination_move:
            return self._runs
        return Runs(
            self._runs.source_addresses + source_move,
            self._runs.destination_addresses + destination_move,
            self._runs.lengths,
        )


def plan_runs(
    source: RankMemory, destination: RankMemory, edge: Edge, layer: int, span: Span
) -> Runs:
    """CopyPlanner.plan for a single use."""
    return CopyPlanner(source, destination).plan(edge, layer, span)


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
        shape = tuple(_moved(part, offsets) for part in parts)
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
    """Raises LayoutMismatch when two regions do not hold the same kind of thing."""
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


def _moved(part: PairedPart, offsets: tuple[int, int]) -> PairedPart:
    source, destination = part.source, part.destination
    return replace(
        part,
        source=replace(source, layer=0, offset_bytes=source.offset_bytes - offsets[0]),
        destination=replace(
            destination, layer=0, offset_bytes=destination.offset_bytes - offsets[1]
        ),
    )


def _plan_layer(layer: _Layer, bases: tuple[int, int], edge: Edge, span: Span) -> Runs:
    planned = []
    for part in layer.parts:
        source, destination = part.source, part.destination
        _check_heads(edge.source_head, edge.head_count, source, "source")
        _check_heads(edge.destination_head, edge.head_count, destination, "destination")
        segments = _segments(source, destination, span)
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
    return concatenate(planned).tidied()


def _segments(source: Region, destination: Region, span: Span) -> Segments:
    """Cuts the span's tokens at the borders of both sides' blocks, or takes them from an equal cut before."""
    key = (source.block_tokens, destination.block_tokens, source.token_addressable)
    found = span.segments.get(key)
    if found is None:
        whole = not source.token_addressable
        found = _whole_blocks(source, span) if whole else _cut(source, destination, span)
        span.segments[key] = found
    return found


def _cut(source: Region, destination: Region, span: Span) -> Segments:
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
    borders = inner[0] if len(inner) == 1 else np.union1d(*inner)
    cuts = np.concatenate(([start], borders, [end]))
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
        np.diff(cuts),
    )


def _whole_blocks(region: Region, span: Span) -> Segments:
    """Each block, or the page of a state, as one unit."""
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
