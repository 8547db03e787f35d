"""An engine that overlaps is called for arrived layers rank by rank, in order and once, from when it may start."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.plan.shard_map import Key, expected_keys
from headrace_kv.receive.observer import LayerOverlap, TransferObserver
from headrace_kv.receive.transfer import IncomingTransfer, PrefillPeer
from tests.unit.kv.receive.test_ledger import make_layout

LAYERS = 5
HEADS = 4


class RecordingListener:
    """Records the calls."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.layers: list[tuple[int, int, bool]] = []

    def arriving(self, transfer_id: str, deadline: Deadline) -> None:
        assert deadline.remaining_s() > 0
        self.started.append(transfer_id)

    def layers_arrived(
        self, transfer_id: str, rank: int, layer_count: int, *, failed: bool
    ) -> None:
        assert transfer_id == "x1"
        self.layers.append((rank, layer_count, failed))


class Arrival:
    """One transfer from `prefill_tp` ranks to `decode_tp`, of which keys land one by one."""

    def __init__(self, overlap_layers: int, prefill_tp: int = 1, decode_tp: int = 1) -> None:
        self.listener = RecordingListener()
        prefill, decode = make_layout(prefill_tp, LAYERS, HEADS), make_layout(decode_tp, LAYERS)
        self.transfer = IncomingTransfer(
            Reservation("x1", (1, 2, 3), 0, 10), decode, Deadline.after(60)
        )
        self.transfer.add_observer(
            LayerOverlap(
                self.listener,
                overlap_layers=overlap_layers,
                layer_count=LAYERS,
                rank_count=decode_tp,
            )
        )
        self.keys = sorted(expected_keys(prefill, decode, "x1"))
        ref = WorkerRef("prefill-0", "1")
        self.peers = {
            rank: PrefillPeer(ref, rank, prefill, lambda message: None, lambda error: None)
            for rank in {source for source, _, _ in self.keys}
        }
        for peer in self.peers.values():
            self.transfer.add_writer(peer, b"")

    def land(self, key: Key) -> None:
        source, destination, layer = key
        assert self.transfer.ledger is not None
        heads = self.transfer.ledger.edge(key).head_count
        done = handoff_pb2.LayerDone(
            transfer_id="x1",
            layer=layer,
            destination_rank=destination,
            start_token=0,
            end_token=10,
            payload_bytes=10 * heads * 100,
        )
        self.transfer.land(self.peers[source], done)
        if self.transfer.whole:
            self.transfer.complete()
        self.transfer.report_progress()


@given(
    ranks=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)]),
    overlap_layers=st.integers(1, LAYERS - 1),
    seed=st.integers(0, 999),
)
def test_layers_are_reported_in_any_order_of_keys(
    ranks: tuple[int, int], overlap_layers: int, seed: int
) -> None:
    arrival = Arrival(overlap_layers, *ranks)
    order = arrival.keys
    Random(seed).shuffle(order)
    started = False
    for number, key in enumerate(order):
        arrival.land(key)
        missing = set(order[number + 1 :])
        whole = {
            rank: min((layer for _, to, layer in missing if to == rank), default=LAYERS)
            for rank in range(ranks[1])
        }
        # A whole transfer is not started early.
        started |= bool(missing) and min(whole.values()) >= LAYERS - overlap_layers
        assert arrival.listener.started == ["x1"] * started
        if started:
            reported = {rank: count for rank, count, _ in arrival.listener.layers}
            assert reported == whole
        else:
            assert arrival.listener.layers == []


class PendingLayer(TransferObserver):
    """A feature that has not finished with layer 2 of rank 0 until `keys` is cleared."""

    def __init__(self) -> None:
        self.keys: set[Key] = {(0, 0, 2)}

    @property
    def pending_keys(self) -> set[Key]:
        return self.keys


def test_a_layer_that_an_observer_holds_back_has_not_arrived() -> None:
    arrival = Arrival(overlap_layers=2, decode_tp=2)
    pending = PendingLayer()
    arrival.transfer.add_observer(pending)
    for key in arrival.keys:
        arrival.land(key)
    assert arrival.transfer.landed
    assert [arrival.transfer.arrived_layers(rank) for rank in range(2)] == [2, LAYERS]
    assert not arrival.listener.started
    assert not arrival.transfer.whole
    pending.keys.clear()
    arrival.transfer.report_progress()
    assert arrival.transfer.arrived_layers(0) == LAYERS
    assert arrival.listener.started == ["x1"]
