"""Which prefill rank writes which heads to which decode rank. Pure, and the same on both sides.

A head is held by `min(tensor_parallel_size, kv_head_count)` distinct shards; ranks beyond that hold copies. Where
copies exist the writer is chosen by (transfer, layer), so that one transfer uses every copy's network card while both
sides still know, without talking, who writes what.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from headrace_common.errors import LayoutMismatch


@dataclass(frozen=True, slots=True)
class Edge:
    """`head_count` heads that go from one prefill rank to one decode rank, from head `..._head` of each on."""

    source_rank: int
    destination_rank: int
    source_head: int
    destination_head: int
    head_count: int


Key = tuple[int, int, int]
"""(source rank, destination rank, layer): what the ledger counts."""


@lru_cache(maxsize=4096)
def transfer_seed(transfer_id: str) -> int:
    """A number that every process derives alike from a transfer's id."""
    return int.from_bytes(blake2b(transfer_id.encode(), digest_size=8).digest(), "little")


def shards(tensor_parallel_size: int, kv_head_count: int) -> tuple[int, int]:
    """Distinct shards of the heads, and the copies of each.

    Raises LayoutMismatch when the ranks cannot share the heads evenly.
    """
    shard_count = min(tensor_parallel_size, kv_head_count)
    if shard_count < 1 or tensor_parallel_size % shard_count or kv_head_count % shard_count:
        raise LayoutMismatch(
            f"tensor_parallel_size {tensor_parallel_size} and kv_head_count {kv_head_count} do not divide evenly: "
            "choose a tensor_parallel_size that divides the KV heads or is a multiple of them",
            metadata={
                "tensor_parallel_size": str(tensor_parallel_size),
                "kv_head_count": str(kv_head_count),
            },
        )
    return shard_count, tensor_parallel_size // shard_count


def edges(
    prefill_tp: int, decode_tp: int, kv_head_count: int, layer: int, transfer_id: str
) -> tuple[Edge, ...]:
    """Every edge of one layer, by destination rank and head.

    Raises LayoutMismatch as `shards` does.
    """
    _, copies = shards(prefill_tp, kv_head_count)
    turn = (transfer_seed(transfer_id) + layer) % copies
    return _edges_of_turn(prefill_tp, decode_tp, kv_head_count, turn)


def edges_from(
    source_rank: int,
    prefill_tp: int,
    decode_tp: int,
    kv_head_count: int,
    layer: int,
    transfer_id: str,
) -> tuple[Edge, ...]:
    """The edges of one layer that leave one prefill rank."""
    _, copies = shards(prefill_tp, kv_head_count)
    turn = (transfer_seed(transfer_id) + layer) % copies
    return _edges_of_source(prefill_tp, decode_tp, kv_head_count, turn, source_rank)


def expected_keys(
    prefill_tp: int, decode_tp: int, kv_head_count: int, layer_count: int, transfer_id: str
) -> frozenset[Key]:
    """The effective transfers of a whole prompt: what must land before decode may run."""
    return frozenset(
        (edge.source_rank, edge.destination_rank, layer)
        for layer in range(layer_count)
        for edge in edges(prefill_tp, decode_tp, kv_head_count, layer, transfer_id)
    )


@lru_cache(maxsize=1024)
def _edges_of_turn(
    prefill_tp: int, decode_tp: int, kv_head_count: int, turn: int
) -> tuple[Edge, ...]:
    source_shards, source_copies = shards(prefill_tp, kv_head_count)
    destination_shards, destination_copies = shards(decode_tp, kv_head_count)
    source_heads = kv_head_count // source_shards
    destination_heads = kv_head_count // destination_shards
    found = []
    for rank in range(decode_tp):
        first = (rank // destination_copies) * destination_heads
        end = first + destination_heads
        copy = (turn + rank % destination_copies) % source_copies
        for shard in range(first // source_heads, (end - 1) // source_heads + 1):
            low = max(first, shard * source_heads)
            high = min(end, (shard + 1) * source_heads)
            found.append(
                Edge(
                    source_rank=shard * source_copies + copy,
                    destination_rank=rank,
                    source_head=low - shard * source_heads,
                    destination_head=low - first,
                    head_count=high - low,
                )
            )
    return tuple(found)


@lru_cache(maxsize=8192)
def _edges_of_source(
    prefill_tp: int, decode_tp: int, kv_head_count: int, turn: int, source_rank: int
) -> tuple[Edge, ...]:
    every = _edges_of_turn(prefill_tp, decode_tp, kv_head_count, turn)
    return tuple(edge for edge in every if edge.source_rank == source_rank)
