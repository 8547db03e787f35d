"""Completion is counted over the plan, whatever a peer acknowledges and however often."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace_common.errors import ProtocolViolation
from headrace_kv.layout import STATE, CacheGroup, KvLayout, Part
from headrace_kv.messages import Reservation
from headrace_kv.receive.ledger import Ledger
from headrace_kv.shard_map import edges

BLOCK_TOKENS = 4


def make_layout(decode_tp: int, layers: int, heads: int = 4) -> KvLayout:
    return KvLayout.attention(
        model="m",
        dtype="float32",
        layer_count=layers,
        kv_head_count=heads,
        tensor_parallel_size=decode_tp,
        block_tokens=BLOCK_TOKENS,
        parts={"k": 60, "v": 40},
    )


def make_ledger(prefill_tp: int, decode_tp: int, layers: int) -> Ledger:
    reservation = Reservation("x1", (1, 2, 3), 0, 10)
    layout = make_layout(decode_tp, layers)
    return Ledger(layout, replace(layout, tensor_parallel_size=prefill_tp), reservation)


class LedgerMachine(RuleBasedStateMachine):
    """Any order of right, repeated and wrong acknowledgements, against a model of covered tokens."""

    @initialize(
        sizes=st.sampled_from([(1, 1), (2, 1), (1, 4), (4, 2), (8, 2)]), start=st.integers(0, 2)
    )
    def begin(self, sizes: tuple[int, int], start: int) -> None:
        self.prefill_tp, self.decode_tp = sizes
        self.start, self.end = start * BLOCK_TOKENS, 22
        layout = make_layout(self.decode_tp, 3)
        prefill = make_layout(self.prefill_tp, 3)
        self.ledger = Ledger(layout, prefill, Reservation("x1", (1,) * 6, self.start, self.end))
        self.heads = {
            (edge.source_rank, edge.destination_rank, layer): edge.head_count
            for layer, found in enumerate(edges(prefill, layout, "x1"))
            for edge in found
        }
        self.covered = dict.fromkeys(self.heads, self.start)
        self.bytes = 0

    def size(self, key: tuple[int, int, int], start: int, end: int) -> int:
        return (end - start) * self.heads[key] * 100

    @rule(pick=st.integers(0, 1000), first=st.integers(0, 5), blocks=st.integers(1, 6))
    def acknowledge(self, pick: int, first: int, blocks: int) -> None:
        key = sorted(self.heads)[pick % len(self.heads)]
        start = first * BLOCK_TOKENS
        end = min(start + blocks * BLOCK_TOKENS, self.end)
        size = self.size(key, start, end)
        if start < self.start or (start > self.covered[key] and end > self.covered[key]):
            with pytest.raises(ProtocolViolation):
                self.ledger.land(key, start, end, size)
        elif end <= self.covered[key]:
            assert not self.ledger.land(key, start, end, size)
        else:
            self.land(key, start, end)

    def land(self, key: tuple[int, int, int], start: int, end: int) -> None:
        size = self.size(key, start, end)
        assert self.ledger.land(key, start, end, size)
        self.covered[key] = end
        self.bytes += size

    @rule(source=st.integers(0, 9), destination=st.integers(0, 9), layer=st.integers(0, 9))
    def acknowledge_foreign(self, source: int, destination: int, layer: int) -> None:
        key = (source, destination, layer)
        if key not in self.heads:
            with pytest.raises(ProtocolViolation, match=f"layer {layer} from rank {source} to"):
                self.ledger.land(key, self.start, self.end, 0)

    @rule(pick=st.integers(0, 1000))
    def finish_key(self, pick: int) -> None:
        key = sorted(self.heads)[pick % len(self.heads)]
        if self.covered[key] < self.end:
            self.land(key, self.covered[key], self.end)

    @invariant()
    def agrees(self) -> None:
        assert self.ledger.complete == all(end == self.end for end in self.covered.values())
        assert self.ledger.payload_bytes == self.bytes
        assert (self.ledger.missing() == "") == self.ledger.complete
        for source in range(9):
            done = all(self.covered[key] == self.end for key in self.heads if key[0] == source)
            assert self.ledger.source_complete(source) == done


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_missing_layers_are_named_as_ranges() -> None:
    ledger = make_ledger(1, 1, 30)
    for layer in range(30):
        if layer not in (3, *range(17, 30)):
            ledger.land((0, 0, layer), 0, 10, 10 * 4 * 100)
    assert ledger.missing() == "layers 3, 17-29 from rank 0"


def test_missing_names_the_decode_rank_when_not_all_lack_the_layer() -> None:
    ledger = make_ledger(1, 2, 2)
    ledger.land((0, 0, 1), 0, 10, 10 * 2 * 100)
    assert ledger.missing() == "layer 0 from rank 0; layer 1 from rank 0 to rank 1"


@pytest.mark.parametrize(
    "start, end, size, why",
    [
        (4, 10, 800, "skips tokens"),
        (0, 11, 1200, "outside the reserved"),
        (0, 0, 0, "outside the reserved"),
        (0, 10, 3999, "3999 bytes for tokens"),
    ],
)
def test_wrong_acknowledgements_are_rejected(start: int, end: int, size: int, why: str) -> None:
    ledger = make_ledger(1, 1, 1)
    with pytest.raises(ProtocolViolation, match=why):
        ledger.land((0, 0, 0), start, end, size)
    assert ledger.ack_count == 0


def test_opaque_blocks_and_states_are_counted_whole() -> None:
    """Layer 1 is attention with opaque blocks, layer 0 a state that stands for every token."""
    state = CacheGroup("state", (0,), STATE, 2, 0, (Part("ssm", "float32", 500),))
    parts = (Part("kv", "int8", 96, "packed"), Part("k_scale", "float32", 4))
    attention = CacheGroup("attention", (1,), "tokens", 2, BLOCK_TOKENS, parts)
    layout = KvLayout("m", 1, (attention, state))
    ledger = Ledger(layout, layout, Reservation("x1", (1, 2, 3), 0, 10, ((7,),)))
    with pytest.raises(ProtocolViolation, match="a state of token 8"):
        ledger.land((0, 0, 0), 0, 8, 2 * 500)
    assert ledger.land((0, 0, 1), 0, 10, 2 * (3 * 96 + 10 * 4))
    assert not ledger.complete
    assert ledger.land((0, 0, 0), 0, 10, 2 * 500)
    assert not ledger.land((0, 0, 0), 0, 10, 2 * 500)
    assert ledger.complete


def test_tokens_that_a_window_has_left_are_rejected() -> None:
    """Layer 0 has a window of 6 tokens: the blocks of 4 that token 22 attends to begin with token 16."""
    parts = (Part("kv", "float32", 100),)
    window = CacheGroup("window", (0,), "tokens", 1, BLOCK_TOKENS, parts, window_tokens=6)
    chunks = CacheGroup("chunks", (1,), "tokens", 1, BLOCK_TOKENS, parts, chunk_tokens=11)
    layout = KvLayout(
        "m", 1, (window, replace(chunks, chunk_tokens=4), replace(chunks, layers=(2,)))
    )
    blocks = (0, 0, 0, 0, 5, 6)
    ledger = Ledger(layout, layout, Reservation("x1", blocks, 0, 22, (blocks, blocks)))
    with pytest.raises(ProtocolViolation, match=r"outside the reserved \[16, 22\)"):
        ledger.land((0, 0, 0), 12, 22, 1000)
    assert ledger.land((0, 0, 0), 16, 22, 600)
    assert ledger.land((0, 0, 1), 20, 22, 200)
    # The second chunk of 11 tokens ends where the transfer does, inside a block: nothing after it is attended to.
    assert ledger.land((0, 0, 2), 20, 22, 200)
    assert ledger.complete
    whole = Ledger(layout, layout, Reservation("x1", blocks, 0, 20, (blocks, blocks)))
    assert whole.missing_keys == {(0, 0, 0), (0, 0, 2)}


def test_a_stage_sends_its_own_layers_only() -> None:
    decode = replace(make_layout(2, 6, heads=1), stage_starts=(0, 4))
    prefill = replace(make_layout(1, 6, heads=1), stage_starts=(0, 2))
    ledger = Ledger(decode, prefill, Reservation("x1", (1, 2, 3), 0, 10))
    pairs = {(0, 0, 1), (0, 1, 1), (1, 0, 2), (1, 1, 3), (1, 2, 4), (1, 3, 5)}
    assert pairs <= ledger.missing_keys
    assert len(ledger.missing_keys) == 12
    ledger.land((1, 3, 5), 0, 10, 10 * 100)
    assert ledger.missing() == (
        "layers 0-1 from rank 0; layers 2-4 from rank 1; layer 5 from rank 1 to rank 2"
    )
