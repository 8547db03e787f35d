"""Every head reaches every decode rank that holds it exactly once, over the network or from a rank of its host."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import LayoutMismatch
from headrace_kv.compatibility import fingerprint, require_compatible
from headrace_kv.layout import KvLayout, layout_from_proto, layout_to_proto
from headrace_kv.shard_map import (
    Edge,
    edges,
    edges_from,
    heads_held,
    local_edges,
    shards,
    transfer_seed,
)


def make_layout(
    ranks: int,
    heads: int,
    layers: int = 1,
    stage_starts: tuple[int, ...] = (0,),
    broadcast_width: int = 1,
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
        broadcast_width=broadcast_width,
    )


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    """Any two parallelisms of one model, with any local broadcast, whether they divide the heads or not."""
    heads, layers = draw(st.integers(1, 24)), draw(st.integers(1, 6))

    def layout(width: int) -> KvLayout:
        later = draw(st.sets(st.integers(1, layers), max_size=3)) - {layers}
        return make_layout(draw(st.integers(1, 40)), heads, layers, (0, *sorted(later)), width)

    return layout(1), layout(draw(st.sampled_from([1, 1, 2, 3, 4, 9])))


def model_heads(layout: KvLayout, rank: int) -> range:
    size = layout.tensor_parallel_size
    return heads_held(rank % size, size, layout.kv_head_count)


@given(layout_pairs(), st.text(max_size=8))
def test_every_head_is_written_once_by_a_rank_that_holds_it(
    pair: tuple[KvLayout, KvLayout], transfer_id: str
) -> None:
    prefill, decode = pair
    size = decode.tensor_parallel_size
    for layer in range(decode.layer_count):
        written: dict[tuple[int, int], int] = {}
        rank_pairs = Counter[tuple[int, int]]()
        for edge in edges(prefill, decode, transfer_id)[layer]:
            assert layer in prefill.layers_of(edge.source_rank)
            rank_pairs[edge.source_rank, edge.destination_rank] += 1
            held = model_heads(prefill, edge.source_rank)
            for index in range(edge.head_count):
                slot = (edge.destination_rank, edge.destination_head + index)
                assert slot not in written
                written[slot] = held[edge.source_head + index]
        # The ledger's key has no head in it: a pair of ranks may meet only once per layer.
        assert set(rank_pairs.values()) == {1}
        from_network = dict(written)
        for edge in local_edges(decode, transfer_id)[layer]:
            ranks = (edge.source_rank, edge.destination_rank)
            hosts = {rank % size // decode.broadcast_width for rank in ranks}
            assert len(hosts) == len({rank // size for rank in ranks}) == 1
            for index in range(edge.head_count):
                slot = (edge.destination_rank, edge.destination_head + index)
                assert slot not in written
                written[slot] = from_network[edge.source_rank, edge.source_head + index]
        assert written == {
            (rank, index): head
            for rank in range(decode.rank_count)
            if layer in decode.layers_of(rank)
            for index, head in enumerate(model_heads(decode, rank))
        }


@given(layout_pairs(), st.text(max_size=8))
def test_both_sides_compute_the_same_plan(
    pair: tuple[KvLayout, KvLayout], transfer_id: str
) -> None:
    prefill, decode = pair
    received = layout_from_proto(layout_to_proto(decode))
    for layer in range(decode.layer_count):
        sent = [
            edge
            for rank in range(prefill.rank_count)
            for edge in edges_from(rank, prefill, received, transfer_id)[layer]
        ]
        planned = edges(prefill, decode, transfer_id)[layer]
        assert sorted(map(repr, sent)) == sorted(map(repr, planned))


def test_a_transfer_looks_its_layouts_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[KvLayout] = []
    pair = make_layout(4, 8), make_layout(2, 8)
    found = edges_from(0, *pair, "x")

    def hash_of(layout: KvLayout) -> int:
        hashed.append(layout)
        return layout._hash

    monkeypatch.setattr(KvLayout, "__hash__", hash_of)
    assert edges_from(0, *pair, "x") == found
    assert hashed == [*pair]


def test_four_prefill_ranks_send_to_two_decode_ranks() -> None:
    found = edges(make_layout(4, 8), make_layout(2, 8), "x")[0]
    assert list(found) == [Edge(rank, rank // 2, 0, 2 * (rank % 2), 2) for rank in range(4)]


@given(st.integers(1, 40), st.integers(1, 40))
def test_ranks_hold_all_heads_in_order(ranks: int, heads: int) -> None:
    held = [heads_held(rank, ranks, heads) for rank in range(ranks)]
    assert {head for share in held for head in share} == set(range(heads))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert held == sorted(held, key=lambda share: share.start)
    assert [share.heads for share in shards(ranks, heads) for _ in range(share.copies)] == held


@pytest.mark.parametrize("width, crossing", [(1, 8), (2, 4), (3, 3), (4, 2), (8, 1), (16, 1)])
def test_each_host_receives_mla_once(width: int, crossing: int) -> None:
    prefill, decode = make_layout(4, 1), make_layout(8, 1, broadcast_width=width)
    assert len(edges(prefill, decode, "x")[0]) == crossing
    assert len(local_edges(decode, "x")[0]) == 8 - crossing


def test_the_broadcast_width_does_not_affect_compatibility() -> None:
    plain, wide = make_layout(4, 1), make_layout(4, 1, broadcast_width=4)
    assert fingerprint(plain) == fingerprint(wide)
    require_compatible(plain, wide)
    assert layout_from_proto(layout_to_proto(wide)) == wide
    message = layout_to_proto(plain)
    message.ClearField("broadcast_width")
    assert layout_from_proto(message) == plain


def test_the_seed_is_the_same_in_every_process() -> None:
    assert transfer_seed("x1") == 4434663428407787702


@pytest.mark.parametrize("prefill_tp, decode_tp, heads", [(0, 1, 4), (1, 0, 4), (1, 1, 0)])
def test_no_ranks_or_heads_are_rejected(prefill_tp: int, decode_tp: int, heads: int) -> None:
    with pytest.raises(LayoutMismatch, match="cannot share"):
        edges(make_layout(prefill_tp, heads), make_layout(decode_tp, heads), "x")
