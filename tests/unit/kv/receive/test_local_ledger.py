"""Local copies become due as ranges land on the leading rank, and each is counted once."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.errors import InternalError
from headrace_kv.layout import KvLayout
from headrace_kv.messages import Reservation
from headrace_kv.receive.ledger import LayerLanded, LocalCopy, LocalLedger
from headrace_kv.shard_map import Edge, edges, local_edges
from tests.unit.kv.receive.test_ledger import make_layout

TOKENS = 10
TOKEN_BYTES = 100


class Landings:
    """Every range of one transfer of 10 tokens into a worker that copies locally, counted by a LocalLedger."""

    def __init__(
        self,
        layers: int = 3,
        width: int = 4,
        prefill_tp: int = 2,
        decode_tp: int = 4,
        heads: int = 1,
    ) -> None:
        self.decode: KvLayout = replace(
            make_layout(decode_tp, layers, heads), broadcast_width=width
        )
        self.ledger = LocalLedger(self.decode, Reservation("x1", (1, 2, 3), 0, TOKENS))
        prefill = make_layout(prefill_tp, layers, heads)
        self.network = [
            (edge, layer)
            for layer, found in enumerate(edges(prefill, self.decode, "x1"))
            for edge in found
        ]

    def land(self, edge: Edge, layer: int, start: int = 0, end: int = TOKENS) -> None:
        self.ledger.land(LayerLanded(edge, layer, start, end, None))


def test_a_key_is_missing_until_its_copy_is_counted() -> None:
    landings = Landings(layers=1)
    ledger = landings.ledger
    ((edge, _),) = landings.network
    leader = edge.destination_rank
    assert ledger.missing_keys == {(leader, rank, 0) for rank in range(4) if rank != leader}
    assert ledger.take_due(1 << 20) == ()
    assert ledger.missing() == "", "the ledger of network keys names what has not landed"
    landings.land(edge, 0)
    copies = ledger.take_due(1 << 20)
    assert ledger.take_due(1 << 20) == ()
    for copy in copies:
        assert f"layer 0 from decode rank {leader} to rank {copy.edge.destination_rank}" in (
            ledger.missing()
        )
        ledger.count(copy)
    assert not ledger.missing_keys
    assert ledger.missing() == ""
    assert ledger.copied_bytes == 3 * TOKENS * TOKEN_BYTES


def test_copies_follow_chunks_in_bounded_lots() -> None:
    landings = Landings()
    ledger = landings.ledger
    for edge, layer in landings.network:
        landings.land(edge, layer, 0, 4)
    first = ledger.take_due(1)
    assert {(copy.layer, copy.start_token, copy.end_token) for copy in first} == {(0, 0, 4)}
    for edge, layer in landings.network:
        landings.land(edge, layer, 4, TOKENS)
    rest = ledger.take_due(1 << 20)
    ranges = {(copy.layer, copy.start_token, copy.end_token) for copy in rest}
    assert ranges == {(0, 4, 10), (1, 0, 10), (2, 0, 10)}
    assert sum(copy.payload_bytes for copy in (*first, *rest)) == 3 * 3 * TOKENS * TOKEN_BYTES
    with pytest.raises(InternalError, match="not due"):
        ledger.count(next(copy for copy in rest if copy.layer == 0))
    for copy in (*first, *rest):
        assert ledger.missing_keys
        ledger.count(copy)
    assert not ledger.missing_keys
    with pytest.raises(InternalError, match="not due"):
        ledger.count(rest[0])


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 4), st.integers(1, 9)),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=150, deadline=None)
def test_any_order_of_landings_and_copies_ends_with_nothing_missing(
    sizes: tuple[int, int, int, int], seed: int
) -> None:
    prefill_tp, decode_tp, heads, width = sizes
    random = Random(seed)
    landings = Landings(3, width, prefill_tp, decode_tp, heads)
    ledger = landings.ledger
    todo = {pair: [(0, 4), (4, 8), (8, TOKENS)] for pair in landings.network}
    taken: list[LocalCopy] = []
    while todo or taken:
        if todo and random.random() < 0.6:
            pair = random.choice(list(todo))
            landings.land(*pair, *todo[pair].pop(0))
            if not todo[pair]:
                del todo[pair]
        taken += ledger.take_due(random.choice([1, 5000]))
        while taken and random.random() < 0.5:
            ledger.count(taken.pop(0))
        if not todo and not taken:
            taken += ledger.take_due(1 << 30)
    assert not ledger.missing_keys
    keys = sum(edge.head_count for found in local_edges(landings.decode, "x1") for edge in found)
    assert ledger.copied_bytes == keys * TOKENS * TOKEN_BYTES
    network_heads = sum(edge.head_count for edge, _ in landings.network)
    assert network_heads + keys == max(decode_tp, heads) * 3
