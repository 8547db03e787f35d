"""Every head of every layer of every decode rank is written exactly once, by a rank that holds it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import LayoutMismatch
from headrace_kv.shard_map import edges, edges_from, expected_keys, shards, transfer_seed


@st.composite
def parallel_sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(prefill ranks, decode ranks, heads) that divide, powers of two or not."""
    heads = draw(st.integers(1, 24))
    divisors = [size for size in range(1, heads + 1) if heads % size == 0]

    def size() -> int:
        if draw(st.booleans()):
            return draw(st.sampled_from(divisors))
        return heads * draw(st.integers(1, 5))

    return size(), size(), heads


@given(parallel_sizes(), st.integers(0, 80), st.text(max_size=8))
def test_every_head_is_written_once_by_a_holder(
    sizes: tuple[int, int, int], layer: int, transfer_id: str
) -> None:
    prefill_tp, decode_tp, heads = sizes
    source_shards, source_copies = shards(prefill_tp, heads)
    destination_shards, destination_copies = shards(decode_tp, heads)
    written: dict[tuple[int, int], int] = {}
    pairs = Counter[tuple[int, int]]()
    for edge in edges(prefill_tp, decode_tp, heads, layer, transfer_id):
        assert 0 <= edge.source_rank < prefill_tp
        pairs[edge.source_rank, edge.destination_rank] += 1
        for index in range(edge.head_count):
            slot = (edge.destination_rank, edge.destination_head + index)
            assert slot not in written
            assert edge.source_head + index < heads // source_shards
            holder = edge.source_rank // source_copies * (heads // source_shards)
            written[slot] = holder + edge.source_head + index
    per_rank = heads // destination_shards
    assert written == {
        (rank, head): rank // destination_copies * per_rank + head
        for rank in range(decode_tp)
        for head in range(per_rank)
    }
    # The ledger's key has no head in it: a pair of ranks may meet only once per layer.
    assert set(pairs.values()) == {1}


@given(parallel_sizes(), st.integers(1, 6), st.text(max_size=8))
def test_expected_keys_are_the_edges(
    sizes: tuple[int, int, int], layer_count: int, transfer_id: str
) -> None:
    prefill_tp, decode_tp, heads = sizes
    found = {
        (rank, edge.destination_rank, layer)
        for layer in range(layer_count)
        for rank in range(prefill_tp)
        for edge in edges_from(rank, prefill_tp, decode_tp, heads, layer, transfer_id)
    }
    assert found == expected_keys(prefill_tp, decode_tp, heads, layer_count, transfer_id)


def test_copies_share_the_work_evenly() -> None:
    load = Counter(
        edge.source_rank for layer in range(32) for edge in edges(8, 2, 1, layer, "x" + "0" * 32)
    )
    assert load == dict.fromkeys(range(8), 8)


def test_seed_is_the_same_in_every_process() -> None:
    assert transfer_seed("x1") == 4434663428407787702


@pytest.mark.parametrize("prefill_tp, decode_tp, heads", [(3, 1, 4), (1, 6, 4), (0, 1, 4)])
def test_uneven_sizes_are_named(prefill_tp: int, decode_tp: int, heads: int) -> None:
    with pytest.raises(LayoutMismatch, match="do not divide evenly"):
        edges(prefill_tp, decode_tp, heads, 0, "x")
