"""Decode ranks that need the same KV: one receives it and copies it to the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace_engine.sim.faults import CorruptByte, SimFaults
from headrace_kv.plan.shard_map import expected_keys
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from tests.component.engine.sim.support import Handed, Lent, Pair, pair

PROMPT = list(range(100, 150))
TOKENS = len(PROMPT) - 1
LAYERS = 3
TOKEN_BYTES = 16
MLA_BYTES = TOKENS * LAYERS * TOKEN_BYTES
MLA = f"sim:layers={LAYERS},heads=1,context=512"


async def hand_over(
    prefill_tp: int, decode_tp: int, *, broadcast: bool, model: str = MLA, **changes: Any
) -> tuple[Handed, Pair]:
    """Runs one request and checks its answer."""
    async with pair(
        prefill={"tensor_parallel_size": prefill_tp},
        decode={"tensor_parallel_size": decode_tp, "local_broadcast": broadcast},
        model=model,
        max_num_batched_tokens=16,
        **changes,
    ) as both:
        handed = await both.generate(PROMPT)
        assert handed.tokens == both.decode.model.expected_tokens(PROMPT, 6)
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


@pytest.mark.parametrize(
    "model",
    [
        "sim:layers=4,heads=1,parts=nope:32/rope:8,index_layers=2,context=512",
        "sim:layers=3,heads=2,state_layers=2,state_heads=2,context=512",
        "sim:layers=4,heads=2,order=nhd,stages=2,context=512",
        "sim:layers=2,heads=1,block_format=token_inner,context=512",
    ],
)
async def test_caches_of_every_kind(model: str) -> None:
    plain, _ = await hand_over(2, 4, broadcast=False, model=model)
    broadcast, _ = await hand_over(2, 4, broadcast=True, model=model)
    network_bytes, local_bytes = bytes_of(broadcast)
    assert local_bytes > 0
    assert network_bytes + local_bytes == bytes_of(plain)[0]


@pytest.mark.parametrize("rank", range(4))
async def test_a_byte_that_is_corrupt_after_a_local_copy_changes_the_answer(rank: int) -> None:
    faults = SimFaults(corrupt=CorruptByte(rank=rank, layer=1, head=0, token=3, byte=5))
    async with pair(
        decode={"tensor_parallel_size": 4, "local_broadcast": True},
        decode_faults=faults,
        model=MLA,
    ) as both:
        handed = await both.generate(PROMPT)
        assert handed.tokens != both.decode.model.expected_tokens(PROMPT, 6)


async def test_many_requests_spread_over_the_ranks() -> None:
    async with pair(
        prefill={"tensor_parallel_size": 2},
        decode={"tensor_parallel_size": 4, "local_broadcast": True},
        model=MLA,
    ) as both:
        prompts = [[1000 * index + token for token in range(30)] for index in range(40)]
        answers = await asyncio.gather(
            *(
                both.generate(prompt, transfer_id=f"x{index}")
                for index, prompt in enumerate(prompts)
            )
        )
        load = Counter[int]()
        for prompt, handed in zip(prompts, answers, strict=True):
            assert handed.tokens == both.decode.model.expected_tokens(prompt, 6)
            assert handed.outcome is not None
            for _, sent in handed.outcome.layers:
                load[sent.destination_rank] += sent.payload_bytes
        assert set(load) == set(range(4))
        assert max(load.values()) < 2 * min(load.values())


@pytest.fixture(scope="module")
def mooncake_ranks() -> Iterator[list[KvTransport]]:
    transports = [open_transport("mooncake", "127.0.0.1") for _ in range(8)]
    yield transports
    with ThreadPoolExecutor(len(transports)) as threads:
        for closing in [threads.submit(transport.close) for transport in transports]:
            closing.result()


kept: list[Pair] = []
"""A lent transport keeps the memory registered, so the memory must outlive it."""


async def over_mooncake(
    ranks: list[KvTransport], prefill_tp: int, decode_tp: int, *, broadcast: bool
) -> tuple[Handed, Pair]:
    prefill_side, decode_side = iter(ranks[:4]), iter(ranks[4:])
    handed, both = await hand_over(
        prefill_tp,
        decode_tp,
        broadcast=broadcast,
        prefill_transports=lambda: Lent(next(prefill_side), receives=False),
        decode_transports=lambda: Lent(next(decode_side)),
    )
    kept.append(both)
    return handed, both


async def test_mla_crosses_mooncake_once(mooncake_ranks: list[KvTransport]) -> None:
    plain, _ = await over_mooncake(mooncake_ranks, 2, 4, broadcast=False)
    broadcast, _ = await over_mooncake(mooncake_ranks, 2, 4, broadcast=True)
    assert 4 * bytes_of(broadcast)[0] == bytes_of(plain)[0] == 4 * MLA_BYTES


async def test_mla_from_four_ranks_to_two_completes_after_two_writes_a_layer(
    mooncake_ranks: list[KvTransport],
) -> None:
    """Of four prefill ranks, two have nothing to send for a layer and send no message.

    A receiver that waits for as many messages as there are prefill ranks never ends.
    """
    handed, both = await over_mooncake(mooncake_ranks, 4, 2, broadcast=False)
    prefill, decode = both.prefill.descriptor.layout, both.decode.descriptor.layout
    keys = expected_keys(prefill, decode, handed.reservation.transfer_id)
    assert Counter(layer for _, _, layer in keys) == dict.fromkeys(range(LAYERS), 2)
    assert handed.outcome is not None
    chunks = -(-TOKENS // 16)
    writes = Counter(sent.layer for _, sent in handed.outcome.layers)
    assert writes == dict.fromkeys(range(LAYERS), 2 * chunks)
    for layer in range(LAYERS):
        assert len({rank for rank, sent in handed.outcome.layers if sent.layer == layer}) == 2
    assert bytes_of(handed) == (2 * MLA_BYTES, 0)
    broadcast, _ = await over_mooncake(mooncake_ranks, 4, 2, broadcast=True)
    assert bytes_of(broadcast) == (MLA_BYTES, MLA_BYTES)
