"""From (edge, layer, block lists) to the longest contiguous byte runs. Pure, vectorised."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import LayoutMismatch, ProtocolViolation
from headrace_kv.layout import RankMemory, Region
from headrace_kv.shard_map import Edge

Int64Array = NDArray[np.int64]

_PLANS_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Runs:
    """Copies of `lengths` bytes; three int64 arrays of shape [run]."""

    source_addresses: Int64Array
    destination_addresses: Int64Array
    lengths: Int64Array

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all runs together."""
        return int(self.lengths.sum())

    def batches(self, entry_limit: int, byte_limit: int) -> Iterator[Runs]:
        """Cuts into parts of at most `entry_limit` runs and `byte_limit` bytes each; long runs are split."""
        if len(self) <= entry_limit and self.payload_bytes <= byte_limit:
            if len(self):
                yield self
            return
        whole = self._split(byte_limit)
        ends = np.cumsum(whole.lengths)
        start = 0
        while start < len(whole):
            sent = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, sent + byte_limit, side="right"))
            stop = min(stop, start + entry_limit)
            yield Runs(
                whole.source_addresses[start:stop],
                whole.destination_addresses[start:stop],
                whole.lengths[start:stop],
            )
            start = stop

    def _split(self, byte_limit: int) -> Runs:
        pieces = -(-self.lengths // byte_limit)
        if not np.any(pieces > 1):
            return self
        run = np.repeat(np.arange(len(self)), pieces)
        offset = (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * byte_limit
        return Runs(
            self.source_addresses[run] + offset,
            self.destination_addresses[run] + offset,
            np.minimum(self.lengths[run] - offset, byte_limit),
        )


class CopyPlanner:
    """Plans copies from one rank's memory into another's; made once per pair and reused.

    Layers mostly differ by where they start: then a plan for the same block arrays (the very same objects) is moved
    instead of made again. Raises LayoutMismatch when the two memories' regions do not pair up.
    """

    def __init__(self, source: RankMemory, destination: RankMemory) -> None:
        self._source = source
        self._destination = destination
        self._layers = _pair_regions(source, destination)
        self._recent: OrderedDict[tuple[Edge, int, int], _Plan] = OrderedDict()

    def plan(
        self, edge: Edge, layer: int, source_blocks: Int64Array, destination_blocks: Int64Array
    ) -> Runs:
        """Runs that copy the edge's heads of `source_blocks[i]` to `destination_blocks[i]` in every part of a layer.

        Both arrays have shape [block] and are not changed afterwards. Raises ProtocolViolation when a block or head
        lies outside its arena.
        """
        found = self._layers.get(layer)
        if found is None:
            raise LayoutMismatch(f"layer {layer} has no region", metadata={"layer": str(layer)})
        # A remembered plan holds its arrays, so no other object can have their ids.
        key = (edge, id(source_blocks), id(destination_blocks))
        plan = self._recent.get(key)
        if plan is None or not plan.fits(found):
            plan = self._plan_anew(edge, found, source_blocks, destination_blocks)
            self._recent[key] = plan
            if len(self._recent) > _PLANS_REMEMBERED:
                self._recent.popitem(last=False)
        return plan.at(found, self._source, self._destination)

    def _plan_anew(
        self, edge: Edge, layer: _Layer, source_blocks: Int64Array, destination_blocks: Int64Array
    ) -> _Plan:
        if len(source_blocks) != len(destination_blocks):
            raise ProtocolViolation(
                f"{len(source_blocks)} source blocks cannot be paired with {len(destination_blocks)} of decode"
            )
        _check_blocks(source_blocks, self._source, "source")
        _check_blocks(destination_blocks, self._destination, "destination")
        bases = (self._source.base_address, self._destination.base_address)
        planned = [
            _plan_part(bases, pair, edge, source_blocks, destination_blocks) for pair in layer.pairs
        ]
        runs = planned[0] if len(planned) == 1 else _concatenate(planned)
        return _Plan(layer, source_blocks, destination_blocks, _merge(runs))


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's (source, destination) regions by part. Equal `geometry` means: the same but for the offsets."""

    pairs: tuple[tuple[Region, Region], ...]
    geometry: tuple[int, ...]
    source_offset: int
    destination_offset: int


class _Plan:
    """Runs of one layer that can be moved to another of the same geometry."""

    def __init__(
        self, layer: _Layer, source_blocks: Int64Array, destination_blocks: Int64Array, runs: Runs
    ) -> None:
        self._layer = layer
        self._blocks = (source_blocks, destination_blocks)
        self._runs = runs
        self._source_span = _span(runs.source_addresses, runs.lengths)
        self._destination_span = _span(runs.destination_addresses, runs.lengths)

    def fits(self, layer: _Layer) -> bool:
        return self._layer is layer or self._layer.geometry == layer.geometry

    def at(self, layer: _Layer, source: RankMemory, destination: RankMemory) -> Runs:
        source_move = layer.source_offset - self._layer.source_offset
        destination_move = layer.destination_offset - self._layer.destination_offset
        _check_inside(self._source_span, source_move, source, "source")
        _check_inside(self._destination_span, destination_move, destination, "destination")
        return Runs(
            self._runs.source_addresses + source_move,
            self._runs.destination_addresses + destination_move,
            self._runs.lengths,
        )


def plan_runs(
    source: RankMemory,
    destination: RankMemory,
    edge: Edge,
    layer: int,
    source_block_ids: Sequence[int],
    destination_block_ids: Sequence[int],
) -> Runs:
    """CopyPlanner.plan for a single use."""
    return CopyPlanner(source, destination).plan(
        edge,
        layer,
        np.asarray(source_block_ids, dtype=np.int64),
        np.asarray(destination_block_ids, dtype=np.int64),
    )


def _pair_regions(source: RankMemory, destination: RankMemory) -> dict[int, _Layer]:
    ours = {(region.layer, region.part): region for region in source.regions}
    theirs = {(region.layer, region.part): region for region in destination.regions}
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())[:4]
        named = ", ".join(f"layer {layer} part {part}" for layer, part in odd)
        raise LayoutMismatch(f"only one side's memory has {named}", metadata={"regions": named})
    pairs: dict[int, list[tuple[Region, Region]]] = {}
    for (layer, part), region in sorted(ours.items()):
        other = theirs[layer, part]
        if region.head_bytes != other.head_bytes:
            difference = f"{region.head_bytes} != {other.head_bytes}"
            raise LayoutMismatch(
                f"head_bytes of layer {layer} part {part} differ: {difference}",
                metadata={"head_bytes": difference},
            )
        pairs.setdefault(layer, []).append((region, other))
    return {layer: _describe(tuple(found)) for layer, found in pairs.items()}


def _describe(pairs: tuple[tuple[Region, Region], ...]) -> _Layer:
    firsts = pairs[0]
    geometry: list[int] = []
    for pair in pairs:
        for region, first in zip(pair, firsts, strict=True):
            geometry += (
                region.offset_bytes - first.offset_bytes,
                region.block_stride_bytes,
                region.head_stride_bytes,
                region.head_bytes,
            )
    return _Layer(pairs, tuple(geometry), firsts[0].offset_bytes, firsts[1].offset_bytes)


def _plan_part(
    bases: tuple[int, int],
    pair: tuple[Region, Region],
    edge: Edge,
    source_blocks: Int64Array,
    destination_blocks: Int64Array,
) -> Runs:
    source, destination = pair
    starts = _starts(bases[0], source, edge.source_head, source_blocks)
    targets = _starts(bases[1], destination, edge.destination_head, destination_blocks)
    length = source.head_bytes
    count = edge.head_count
    if count > 1:
        if source.head_stride_bytes == length and destination.head_stride_bytes == length:
            length *= count
        else:
            heads = np.arange(count, dtype=np.int64)
            # With heads outermost, blocks of one head follow each other and can merge; else heads of one block can.
            outer = source.head_stride_bytes > source.block_stride_bytes
            starts = _spread(starts, heads * source.head_stride_bytes, outer)
            targets = _spread(targets, heads * destination.head_stride_bytes, outer)
    return Runs(starts, targets, np.full(len(starts), length, dtype=np.int64))


def _starts(base_address: int, region: Region, head: int, blocks: Int64Array) -> Int64Array:
    first = base_address + region.offset_bytes + head * region.head_stride_bytes
    return blocks * region.block_stride_bytes + first


def _spread(starts: Int64Array, head_offsets: Int64Array, heads_outer: bool) -> Int64Array:
    if heads_outer:
        return (head_offsets[:, None] + starts[None, :]).ravel()
    return (starts[:, None] + head_offsets[None, :]).ravel()


def _concatenate(parts: list[Runs]) -> Runs:
    return Runs(
        np.concatenate([part.source_addresses for part in parts]),
        np.concatenate([part.destination_addresses for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


def _merge(runs: Runs) -> Runs:
    """Joins neighbours in the list that are also neighbours in memory, on both sides."""
    if len(runs) < 2:
        return runs
    lengths = runs.lengths[:-1]
    breaks = (np.diff(runs.source_addresses) != lengths) | (
        np.diff(runs.destination_addresses) != lengths
    )
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    if len(firsts) == len(runs):
        return runs
    return Runs(
        runs.source_addresses[firsts],
        runs.destination_addresses[firsts],
        np.add.reduceat(runs.lengths, firsts),
    )


def _check_blocks(blocks: Int64Array, memory: RankMemory, side: str) -> None:
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= memory.block_count):
        wrong = blocks[(blocks < 0) | (blocks >= memory.block_count)][0]
        raise ProtocolViolation(
            f"{side} block {wrong} is not one of the {memory.block_count} blocks of rank {memory.rank}",
            metadata={"block": str(wrong), "side": side},
        )


def _span(addresses: Int64Array, lengths: Int64Array) -> tuple[int, int] | None:
    if not len(addresses):
        return None
    return int(addresses.min()), int((addresses + lengths).max())


def _check_inside(span: tuple[int, int] | None, move: int, memory: RankMemory, side: str) -> None:
    if span is None:
        return
    low, high = span[0] + move, span[1] + move
    if low < memory.base_address or high > memory.base_address + memory.arena_bytes:
        raise ProtocolViolation(
            f"a copy would leave the {side} arena of rank {memory.rank}: its regions do not fit its arena_bytes",
            metadata={"side": side, "rank": str(memory.rank)},
        )
