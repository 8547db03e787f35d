"""Every head of every layer of every decode rank is written exactly once, by a rank that holds it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import LayoutMismatch
from headrace_kv.layout.layout import KvLayout
from headrace_kv.plan.shard_map import (
    edges,
    edges_from,
    expected_keys,
    heads_held,
    shards,
    transfer_seed,
)


def make_layout(
    ranks: int, heads: int, layers: int = 1, stage_starts: tuple[int, ...] = (0,)
) -> KvLayout:
    return KvLayout.attention(
        model="m",
        dtype="float32",
        layer_count=layers,
        kv_head_count=heads,
        block_tokens=4,
        parts={"kv": 8},
        tensor_parallel_size=ranks,
        stage_starts=stage_starts,
    )


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    """Any two parallelisms of one model, whether they divide the heads or not."""
    heads, layers = draw(st.integers(1, 24)), draw(st.integers(1, 6))

    def layout() -> KvLayout:
        later = draw(st.sets(st.integers(1, layers), max_size=3)) - {layers}
        return make_layout(draw(st.integers(1, 40)), heads, layers, (0, *sorted(later)))

    return layout(), layout()


@given(layout_pairs(), st.text(max_size=8))
def test_every_head_is_written_once_by_a_holder(
    pair: tuple[KvLayout, KvLayout], transfer_id: str
) -> None:
    prefill, decode = pair
    heads = decode.kv_head_count
    for layer in range(decode.layer_count):
        written: dict[tuple[int, int], int] = {}
        pairs = Counter[tuple[int, int]]()
        for edge in edges(prefill, decode, layer, transfer_id):
            assert layer in prefill.layers_of(edge.source_rank)
            pairs[edge.source_rank, edge.destination_rank] += 1
            source = edge.source_rank % prefill.tensor_parallel_size
            held = heads_held(source, prefill.tensor_parallel_size, heads)
            for index in range(edge.head_count):
                slot = (edge.destination_rank, edge.destination_head + index)
                assert slot not in written
                written[slot] = held[edge.source_head + index]
        ranks = [rank for rank in range(decode.rank_count) if layer in decode.layers_of(rank)]
        assert written == {
            (rank, index): head
            for rank in ranks
            for index, head in enumerate(
                heads_held(rank % decode.tensor_parallel_size, decode.tensor_parallel_size, heads)
            )
        }
        # The ledger's key has no head in it: a pair of ranks may meet only once per layer.
        assert set(pairs.values()) == {1}


@given(layout_pairs(), st.text(max_size=8))
def test_expected_keys_are_the_edges(pair: tuple[KvLayout, KvLayout], transfer_id: str) -> None:
    prefill, decode = pair
    found = {
        (rank, edge.destination_rank, layer)
        for layer in range(decode.layer_count)
        for rank in range(prefill.rank_count)
        for edge in edges_from(rank, prefill, decode, layer, transfer_id)
    }
    assert found == expected_keys(prefill, decode, transfer_id)


@given(st.integers(1, 40), st.integers(1, 40))
def test_ranks_hold_all_heads_in_order(ranks: int, heads: int) -> None:
    held = [heads_held(rank, ranks, heads) for rank in range(ranks)]
    assert {head for share in held for head in share} == set(range(heads))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert held == sorted(held, key=lambda share: share.start)
    assert [share.heads for share in shards(ranks, heads) for _ in range(share.copies)] == held


def test_three_ranks_to_two_with_six_heads() -> None:
    found = edges(make_layout(3, 6), make_layout(2, 6), 0, "x")
    assert [(e.source_rank, e.destination_rank, e.source_head, e.head_count) for e in found] == [
        (0, 0, 0, 2),
        (1, 0, 0, 1),
        (1, 1, 1, 1),
        (2, 1, 0, 2),
    ]


@pytest.mark.parametrize(
    "prefill_tp, decode_tp, heads",
    [(8, 2, 1), (8, 4, 1), (2, 8, 1), (8, 2, 2), (8, 4, 4), (4, 8, 2), (6, 4, 2), (16, 16, 4)],
)
def test_copies_share_the_work_evenly(prefill_tp: int, decode_tp: int, heads: int) -> None:
    """Bytes of each prefill rank over 200 requests of 61 layers, within 5 % of each other."""
    prefill, decode = make_layout(prefill_tp, heads, 61), make_layout(decode_tp, heads, 61)
    load = Counter(
        {
            rank: sum(
                edge.head_count
                for request in range(200)
                for layer in range(61)
                for edge in edges_from(rank, prefill, decode, layer, f"x{request:032x}")
            )
            for rank in range(prefill_tp)
        }
    )
    assert max(load.values()) <= 1.05 * min(load.values())


def test_one_request_uses_every_copy() -> None:
    prefill, decode = make_layout(8, 1, 32), make_layout(2, 1, 32)
    load = Counter(
        edge.source_rank
        for layer in range(32)
        for edge in edges(prefill, decode, layer, "x" + "0" * 32)
    )
    assert load == dict.fromkeys(range(8), 8)


def test_seed_is_the_same_in_every_process() -> None:
    assert transfer_seed("x1") == 4434663428407787702


@pytest.mark.parametrize("prefill_tp, decode_tp, heads", [(0, 1, 4), (1, 0, 4), (1, 1, 0)])
def test_no_ranks_or_heads_are_refused(prefill_tp: int, decode_tp: int, heads: int) -> None:
    with pytest.raises(LayoutMismatch, match="cannot share"):
        edges(make_layout(prefill_tp, heads), make_layout(decode_tp, heads), 0, "x")
