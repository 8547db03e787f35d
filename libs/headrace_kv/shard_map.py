"""Which prefill rank writes which heads to which decode rank. Pure; both sides compute the same plan.

Any number of ranks works with any number of heads. Of `t` tensor-parallel ranks, rank r holds the heads from
`r * heads // t` to the next rank's first, and at least one. With more ranks than heads, neighbouring ranks hold copies.
Of several copies, (transfer, layer) selects the writer. So one transfer uses the network card of every copy, and both
sides agree without a message. A pipeline stage takes part in its own layers only.

Decode ranks that hold copies can share a host (KvLayout.broadcast_width). Then the network writes to one of them, the
leader, and local edges copy from it to the others. (transfer, layer) selects the leader too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import lcm
from typing import Final, Literal, TypeAlias

from headrace_common.errors import ConfigError, LayoutMismatch
from headrace_kv.layout import (
    STATE,
    TOKEN_OUTER,
    CacheGroup,
    KvLayout,
    Part,
    Region,
)


@dataclass(frozen=True, slots=True)
class Edge:
    """A copy of `head_count` heads from one rank to another, starting at head `..._head` of each.

    The destination is a decode rank. The source is a prefill rank, or in a local edge a decode rank.
    """

    source_rank: int
    destination_rank: int
    source_head: int
    destination_head: int
    head_count: int


Edges: TypeAlias = tuple[tuple[Edge, ...], ...]
"""Those of each layer."""
Key = tuple[int, int, int]
"""(source rank, destination rank, layer). The ledgers of network edges and of local edges count by it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The heads `heads`, of which `copies` tensor-parallel ranks from `first_rank` on hold a copy each."""

    heads: range
    first_rank: int
    copies: int

    def hosts(self, width: int) -> Iterator[range]:
        """Its ranks, grouped by host, with `width` ranks on a host."""
        rank, end = self.first_rank, self.first_rank + self.copies
        while rank < end:
            stop = min(end, (rank // width + 1) * width)
            yield range(rank, stop)
            rank = stop


@lru_cache(maxsize=4096)
def transfer_seed(transfer_id: str) -> int:
    """A number derived from a transfer's id, the same in every process."""
    return int.from_bytes(blake2b(transfer_id.encode(), digest_size=8).digest(), "little")


def heads_held(tp_rank: int, tensor_parallel_size: int, head_count: int) -> range:
    """The heads of the model that a rank of a stage holds."""
    first = tp_rank * head_count // tensor_parallel_size
    return range(first, max((tp_rank + 1) * head_count // tensor_parallel_size, first + 1))


@lru_cache(maxsize=1024)
def shards(tensor_parallel_size: int, head_count: int) -> tuple[Shard, ...]:
    """The shards of the heads, by head. Raises LayoutMismatch when there are no ranks or no heads."""
    if tensor_parallel_size < 1 or head_count < 1:
        raise LayoutMismatch(
            f"{tensor_parallel_size} ranks cannot share {head_count} heads: give 1 or more of each",
            metadata={
                "tensor_parallel_size": str(tensor_parallel_size),
                "head_count": str(head_count),
            },
        )
    found: list[Shard] = []
    for rank in range(tensor_parallel_size):
        heads = heads_held(rank, tensor_parallel_size, head_count)
        if found and found[-1].heads == heads:
            found[-1] = Shard(heads, found[-1].first_rank, found[-1].copies + 1)
        else:
            found.append(Shard(heads, rank, 1))
    return tuple(found)


def edges(prefill: KvLayout, decode: KvLayout, transfer_id: str) -> Edges:
    """Every edge that crosses the network: for each layer, by destination rank and head.

    Raises LayoutMismatch as `shards` does.
    """
    return _edges_of_turn(prefill, decode, transfer_seed(transfer_id) % _turns(prefill, decode))


def edges_from(source_rank: int, prefill: KvLayout, decode: KvLayout, transfer_id: str) -> Edges:
    """The edges that leave one prefill rank, for each layer."""
    return _edges_of_source(prefill, decode, source_rank)(transfer_id)


def local_edges(decode: KvLayout, transfer_id: str) -> Edges:
    """The edges from decode's leaders to the other ranks of their hosts: for each layer, by destination rank.

    Raises LayoutMismatch as `shards` does.
    """
    return _local_edges_of_turn(decode, transfer_seed(transfer_id) % _turns(decode, decode))


@lru_cache(maxsize=128)
def _turns(prefill: KvLayout, decode: KvLayout) -> int:
    """Number of layers after which the same copies write, and the same ranks lead, in every group."""
    return lcm(
        *(
            cycle
            for count in {group.head_count for group in decode.groups}
            for cycle in (
                _cycle(prefill.tensor_parallel_size, count),
                _leader_cycle(decode.tensor_parallel_size, count, decode.broadcast_width),
            )
        )
    )


def _cycle(prefill_tp: int, head_count: int) -> int:
    """Number of layers after which the same copies write again."""
    return lcm(*(shard.copies for shard in shards(prefill_tp, head_count)))


def _leader_cycle(decode_tp: int, head_count: int, width: int) -> int:
    """Number of layers after which the same ranks lead again."""
    found = shards(decode_tp, head_count)
    if width == 1:
        return 1
    return lcm(*(len(host) for shard in found for host in shard.hosts(width)))


@lru_cache(maxsize=128)
def _edges_of_turn(prefill: KvLayout, decode: KvLayout, first_turn: int) -> Edges:
    turns = _turns(prefill, decode)
    # A layer costs ranks times ranks, so equal layers share their edges.
    shared: dict[tuple[int, int, int, int], tuple[Edge, ...]] = {}
    every = []
    for layer, turn in enumerate(range(first_turn, first_turn + decode.layer_count)):
        head_count = decode.group_of(layer).head_count
        shape = head_count, prefill.stage_of(layer), decode.stage_of(layer), turn % turns
        if shape not in shared:
            shared[shape] = tuple(_edges_of_layer(prefill, decode, layer, turn))
        every.append(shared[shape])
    return tuple(every)


def _edges_of_layer(prefill: KvLayout, decode: KvLayout, layer: int, turn: int) -> Iterator[Edge]:
    head_count = decode.group_of(layer).head_count
    prefill_first = prefill.stage_of(layer) * prefill.tensor_parallel_size
    decode_first = decode.stage_of(layer) * decode.tensor_parallel_size
    for wanted in shards(decode.tensor_parallel_size, head_count):
        for index, host in enumerate(wanted.hosts(decode.broadcast_width)):
            for held in shards(prefill.tensor_parallel_size, head_count):
                low = max(wanted.heads.start, held.heads.start)
                high = min(wanted.heads.stop, held.heads.stop)
                if low >= high:
                    continue
                yield Edge(
                    source_rank=prefill_first + held.first_rank + (turn + index) % held.copies,
                    destination_rank=decode_first + _leader(host, turn),
                    source_head=low - held.heads.start,
                    destination_head=low - wanted.heads.start,
                    head_count=high - low,
                )


def _leader(host: range, turn: int) -> int:
    return host[turn % len(host)]


@lru_cache(maxsize=128)
def _local_edges_of_turn(decode: KvLayout, first_turn: int) -> Edges:
    tp = decode.tensor_parallel_size
    return tuple(
        tuple(
            Edge(first + _leader(host, turn), first + rank, 0, 0, len(shard.heads))
            for first in (decode.stage_of(layer) * tp,)
            for shard in shards(tp, decode.group_of(layer).head_count)
            for host in shard.hosts(decode.broadcast_width)
            for rank in host
            if rank != _leader(host, turn)
        )
        for layer, turn in enumerate(range(first_turn, first_turn + decode.layer_count))
    )


@lru_cache(maxsize=128)
def _edges_of_source(prefill: KvLayout, decode: KvLayout, rank: int) -> Callable[[str], Edges]:
    """The edges of a transfer by its id. So a transfer looks its layouts up once."""
    turns = _turns(prefill, decode)

    @lru_cache(maxsize=128)
    def of_turn(first_turn: int) -> Edges:
        return tuple(
            tuple(edge for edge in found if edge.source_rank == rank)
            for found in _edges_of_turn(prefill, decode, first_turn)
        )

    return lambda transfer_id: of_turn(transfer_seed(transfer_id) % turns)


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
