"""With local broadcast, every head still gets to every rank that holds it, once: from outside, or from a neighbour."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_kv.layout.compatibility import fingerprint, require_compatible
from headrace_kv.layout.layout import KvLayout
from headrace_kv.layout.proto import layout_from_proto, layout_to_proto
from headrace_kv.plan.shard_map import edges, edges_from, heads_held, local_edges

UNIT_BYTES = 8


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
        parts={"kv": UNIT_BYTES},
        tensor_parallel_size=ranks,
        stage_starts=stage_starts,
        broadcast_width=broadcast_width,
    )


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    heads, layers = draw(st.integers(1, 12)), draw(st.integers(1, 5))

    def layout(width: int) -> KvLayout:
        later = draw(st.sets(st.integers(1, layers), max_size=3)) - {layers}
        return make_layout(draw(st.integers(1, 24)), heads, layers, (0, *sorted(later)), width)

    return layout(1), layout(draw(st.integers(1, 9)))


def model_heads(layout: KvLayout, rank: int) -> range:
    size = layout.tensor_parallel_size
    return heads_held(rank % size, size, layout.kv_head_count)


@given(layout_pairs(), st.text(max_size=8))
def test_every_head_is_written_once_from_outside_or_by_a_neighbour_that_has_it(
    pair: tuple[KvLayout, KvLayout], transfer_id: str
) -> None:
    prefill, decode = pair
    size = decode.tensor_parallel_size
    for layer in range(decode.layer_count):
        written: dict[tuple[int, int], int] = {}
        for edge in edges(prefill, decode, layer, transfer_id):
            assert layer in prefill.layers_of(edge.source_rank)
            held = model_heads(prefill, edge.source_rank)
            for index in range(edge.head_count):
                slot = (edge.destination_rank, edge.destination_head + index)
                assert slot not in written
                written[slot] = held[edge.source_head + index]
        from_outside = dict(written)
        for edge in local_edges(decode, layer, transfer_id):
            ranks = (edge.source_rank, edge.destination_rank)
            hosts = {rank % size // decode.broadcast_width for rank in ranks}
            assert len(hosts) == len({rank // size for rank in ranks}) == 1
            for index in range(edge.head_count):
                slot = (edge.destination_rank, edge.destination_head + index)
                assert slot not in written
                written[slot] = from_outside[edge.source_rank, edge.source_head + index]
        assert written == {
            (rank, index): head
            for rank in range(decode.rank_count)
            if layer in decode.layers_of(rank)
            for index, head in enumerate(model_heads(decode, rank))
        }


@given(layout_pairs(), st.text(max_size=8))
def test_senders_see_the_same_plan(pair: tuple[KvLayout, KvLayout], transfer_id: str) -> None:
    prefill, decode = pair
    told = layout_from_proto(layout_to_proto(decode))
    for layer in range(decode.layer_count):
        sent = [
            edge
            for rank in range(prefill.rank_count)
            for edge in edges_from(rank, prefill, told, layer, transfer_id)
        ]
        assert sorted(map(repr, sent)) == sorted(
            map(repr, edges(prefill, decode, layer, transfer_id))
        )


@given(layout_pairs(), st.text(max_size=8))
def test_a_width_of_one_is_no_broadcast(pair: tuple[KvLayout, KvLayout], transfer_id: str) -> None:
    _, decode = pair
    assert local_edges(replace(decode, broadcast_width=1), 0, transfer_id) == ()


@pytest.mark.parametrize("width, crossing", [(1, 8), (2, 4), (3, 3), (4, 2), (8, 1), (16, 1)])
def test_each_host_receives_mla_once(width: int, crossing: int) -> None:
    prefill, decode = make_layout(4, 1), make_layout(8, 1, broadcast_width=width)
    assert len(edges(prefill, decode, 0, "x")) == crossing
    assert len(local_edges(decode, 0, "x")) == 8 - crossing


def test_heads_of_their_own_are_never_passed_on() -> None:
    decode = make_layout(4, 8, broadcast_width=4)
    assert local_edges(decode, 0, "x") == ()
    assert len(edges(make_layout(4, 8), decode, 0, "x")) == 4


@pytest.mark.parametrize(
    "prefill_tp, decode_tp, heads, width",
    [(8, 4, 1, 4), (8, 8, 1, 4), (2, 8, 1, 8), (1, 8, 1, 4), (4, 8, 2, 8), (4, 8, 2, 2)],
)
def test_leaders_and_writers_share_the_work_evenly(
    prefill_tp: int, decode_tp: int, heads: int, width: int
) -> None:
    """Pieces per network card over 200 requests of 61 layers, within 5 % of each other on either side."""
    prefill, decode = make_layout(prefill_tp, heads, 61), make_layout(decode_tp, heads, 61)
    decode = replace(decode, broadcast_width=width)
    sent, received, passed_on = Counter[int](), Counter[int](), Counter[int]()
    for request in range(200):
        transfer_id = f"x{request:032x}"
        for layer in range(61):
            for edge in edges(prefill, decode, layer, transfer_id):
                sent[edge.source_rank] += 1
                received[edge.destination_rank] += 1
            for edge in local_edges(decode, layer, transfer_id):
                passed_on[edge.source_rank] += 1
    for load, ranks in ((sent, prefill_tp), (received, decode_tp), (passed_on, decode_tp)):
        assert len(load) == ranks
        assert max(load.values()) <= 1.05 * min(load.values())


def test_the_width_is_nobody_elses_business() -> None:
    plain, wide = make_layout(4, 1), make_layout(4, 1, broadcast_width=4)
    assert fingerprint(plain) == fingerprint(wide)
    require_compatible(plain, wide)
    assert layout_from_proto(layout_to_proto(wide)) == wide
    message = layout_to_proto(plain)
    message.ClearField("broadcast_width")
    assert layout_from_proto(message) == plain
