"""Decode ranks that need the same KV: one receives it and copies it to the others."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace_kv.plan.shard_map import expected_keys
from tests.component.engine.sim.faults import CorruptByte, corrupt_arrived
from tests.component.engine.sim.support import Handed, Pair, pair

PROMPT = list(range(100, 150))
TOKENS = len(PROMPT) - 1
LAYERS = 3
TOKEN_BYTES = 16
MLA_BYTES = TOKENS * LAYERS * TOKEN_BYTES
MLA = f"sim:layers={LAYERS},heads=1,context=512"


async def hand_over(prefill_tp: int, decode_tp: int, *, broadcast: bool) -> tuple[Handed, Pair]:
    """Runs one request and checks its answer."""
    async with pair(
        prefill={"tensor_parallel_size": prefill_tp},
        decode={"tensor_parallel_size": decode_tp, "local_broadcast": broadcast},
        model=MLA,
        max_num_batched_tokens=16,
    ) as both:
        handed = await both.generate(PROMPT)
        assert handed.summary is not None
        assert handed.outcome is not None
        sent_bytes = sum(sent.payload_bytes for _, sent in handed.outcome.layers)
        assert handed.summary.payload_bytes == sent_bytes
        return handed, both


def bytes_of(handed: Handed) -> tuple[int, int]:
    """Bytes over the network, and local ones."""
    assert handed.summary is not None
    return handed.summary.payload_bytes, handed.summary.local_bytes


async def test_mla_from_two_ranks_to_four_crosses_the_network_once() -> None:
    plain, _ = await hand_over(2, 4, broadcast=False)
    broadcast, _ = await hand_over(2, 4, broadcast=True)
    assert bytes_of(plain) == (4 * MLA_BYTES, 0)
    assert bytes_of(broadcast) == (MLA_BYTES, 3 * MLA_BYTES)


@pytest.mark.parametrize("rank", range(4))
async def test_a_byte_that_is_corrupt_after_a_local_copy_changes_the_answer(rank: int) -> None:
    corrupt = CorruptByte(rank=rank, layer=1, part="", token=3, byte=5)
    async with pair(
        decode={"tensor_parallel_size": 4, "local_broadcast": True},
        model=MLA,
    ) as both:
        corrupt_arrived(both.decode, corrupt)
        handed = await both.generate(PROMPT, check=False)
        assert handed.tokens != both.decode.model.expected_tokens(PROMPT, 6)


async def test_mla_from_four_ranks_to_two_completes_after_two_writes_a_layer() -> None:
    """Of four prefill ranks, two have nothing to send for a layer and send no message.

    A receiver that waits for as many messages as there are prefill ranks never ends.
    """
    handed, both = await hand_over(4, 2, broadcast=False)
    prefill, decode = both.prefill.descriptor.layout, both.decode.descriptor.layout
    keys = expected_keys(prefill, decode, handed.reservation.transfer_id)
    assert Counter(layer for _, _, layer in keys) == dict.fromkeys(range(LAYERS), 2)
    assert handed.outcome is not None
    chunks = -(-TOKENS // 16)
    writes = Counter(sent.layer for _, sent in handed.outcome.layers)
    assert writes == dict.fromkeys(range(LAYERS), 2 * chunks)
    for layer in range(LAYERS):
        sent = [(rank, one) for rank, one in handed.outcome.layers if one.layer == layer]
        assert len({rank for rank, _ in sent}) == 2
        assert {one.destination_rank for _, one in sent} == {0, 1}
    assert len({rank for rank, _ in handed.outcome.layers}) == 4
    assert bytes_of(handed) == (2 * MLA_BYTES, 0)
    broadcast, _ = await hand_over(4, 2, broadcast=True)
    assert bytes_of(broadcast) == (MLA_BYTES, MLA_BYTES)
