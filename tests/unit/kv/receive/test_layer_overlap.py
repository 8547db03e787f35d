"""An engine hears of layers from when it may begin on, rank by rank, in order and once."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.handoff.messages import Reservation
from headrace_kv.plan.shard_map import Key
from headrace_kv.receive.layer_overlap import LayerOverlap, OverlapSettings
from headrace_kv.receive.state import TransferState
from headrace_kv.receive.transfer import IncomingTransfer
from tests.unit.kv.receive.test_ledger import make_layout, make_ledger

LAYERS = 5


class Heard:
    """What an engine was told."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.layers: list[tuple[int, int, bool]] = []

    def arriving(self, transfer_id: str, deadline: Deadline) -> None:
        assert deadline.remaining_s() > 0
        self.began.append(transfer_id)

    def layers_arrived(
        self, transfer_id: str, rank: int, layer_count: int, *, failed: bool
    ) -> None:
        assert transfer_id == "x1"
        self.layers.append((rank, layer_count, failed))


class Arrival:
    """One transfer from `prefill_tp` ranks to `decode_tp`, landing key by key."""

    def __init__(self, overlap_layers: int, prefill_tp: int = 1, decode_tp: int = 1) -> None:
        self.heard = Heard()
        self.early = LayerOverlap(
            self.heard, overlap_layers=overlap_layers, layer_count=LAYERS, rank_count=decode_tp
        )
        self.transfer = IncomingTransfer(
            Reservation("x1", (1, 2, 3), 0, 10),
            make_layout(decode_tp, LAYERS),
            Deadline.after(60),
            on_advance=self.early.advance,
        )
        self.ledger = make_ledger(prefill_tp, decode_tp, LAYERS)
        self.transfer.ledger = self.ledger
        for state in (TransferState.OPEN, TransferState.RECEIVING):
            self.transfer._states.enter(state)

    def land(self, key: Key) -> None:
        heads = self.ledger.edge(key).head_count
        self.ledger.land(key, 0, 10, 10 * heads * 100)
        if self.ledger.complete:
            self.transfer.complete()
        self.transfer.advanced()


def test_it_may_begin_when_all_but_the_last_are_there() -> None:
    arrival = Arrival(overlap_layers=2)
    for layer in range(LAYERS):
        assert bool(arrival.heard.began) == (layer > 2)
        arrival.land((0, 0, layer))
    assert arrival.heard.began == ["x1"]
    assert arrival.heard.layers == [(0, 3, False), (0, 4, False), (0, 5, False)]


def test_a_hole_counts_whatever_has_come_after_it() -> None:
    arrival = Arrival(overlap_layers=2)
    for layer in (0, 1, 3, 4):
        arrival.land((0, 0, layer))
    assert not arrival.heard.began
    arrival.land((0, 0, 2))
    # Whole at once: there is nothing to begin early for.
    assert not arrival.heard.began
    assert not arrival.heard.layers


def test_a_failure_is_told_to_those_who_began() -> None:
    for landed in (2, 4):
        arrival = Arrival(overlap_layers=2)
        for layer in range(landed):
            arrival.land((0, 0, layer))
        arrival.transfer.fail(TransferFailed("gone"), 0.0)
        arrival.transfer.advanced()
        told = [entry for entry in arrival.heard.layers if entry[2]]
        assert told == ([(0, 4, True)] if landed == 4 else [])


@given(
    ranks=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)]),
    overlap_layers=st.integers(1, LAYERS - 1),
    seed=st.integers(0, 999),
)
def test_any_order_is_told_as_it_is(ranks: tuple[int, int], overlap_layers: int, seed: int) -> None:
    arrival = Arrival(overlap_layers, *ranks)
    order = sorted(arrival.ledger.expected_keys)
    Random(seed).shuffle(order)
    for number, key in enumerate(order):
        arrival.land(key)
        missing = set(order[number + 1 :])
        whole = {
            rank: min((layer for _, to, layer in missing if to == rank), default=LAYERS)
            for rank in range(ranks[1])
        }
        may_begin = bool(missing) and min(whole.values()) >= LAYERS - overlap_layers
        assert not may_begin or arrival.heard.began == ["x1"]
        if arrival.heard.began:
            told = {rank: count for rank, count, _ in arrival.heard.layers}
            assert told == whole
        else:
            assert arrival.heard.layers == []


def test_more_late_layers_than_the_model_has_are_refused() -> None:
    OverlapSettings(4).check(5)
    with pytest.raises(ConfigError, match="choose 4 or less"):
        OverlapSettings(5).check(5)
