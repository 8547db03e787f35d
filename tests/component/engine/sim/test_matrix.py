"""Pairs of different layouts, from engine to engine over Mooncake's TCP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pytest

from headrace_kv.layout import STATE
from headrace_kv.shard_map import edges
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from tests.component.engine.sim.support import (
    Handed,
    Pair,
    check_answer,
    decode_work,
    needed_bytes,
    pair,
    planned_bytes,
)
from tests.sent_layers import sent_layers

PROMPT = list(range(100, 161))
# Whole blocks of most sizes, and part of one.
SHARED_TOKENS = 50
BLOCKS_OUTER = "order=block/layer/part/head/token"
APART = "order=part/layer/block/head/token"
TOGETHER = "order=layer/block/token/head/part"
NHD = "order=nhd"
HND = "order=hnd"
GQA = "layers=3,heads=4,parts=k:16/v:16"
MLA = "layers=3,heads=1,parts=latent:40"
CONTROL_BYTES_MAX = 64
"""Of a rank's transfer, without its acknowledgements."""
WRITE_CONTROL_BYTES_MAX = 32
"""Of the acknowledgement of a write."""
MLA_APART = "layers=2,heads=1,parts=nope:32/rope:8"
OPAQUE = "layers=2,heads=4,parts=k:16/v:16,block_format=token_inner"


class Side(NamedTuple):
    """One worker: ranks of a stage, tokens of a block, settings of its own, and stages.

    `broadcast`: whether its ranks copy equal bytes to each other.
    """

    ranks: int
    block_tokens: int = 8
    settings: str = ""
    broadcast: bool = False
    stages: int = 1


# Each kind of model once. tests/unit/kv/plan/test_plans_against_naive_copies.py has any two layouts.
PAIRINGS: tuple[tuple[str, Side, Side], ...] = (
    (GQA, Side(1), Side(1)),
    (GQA, Side(2), Side(8)),
    (GQA, Side(8), Side(3)),
    (GQA, Side(4, settings=TOGETHER), Side(2, settings=APART)),
    ("layers=2,heads=8", Side(2, 16, NHD), Side(3, 12, BLOCKS_OUTER)),
    ("layers=2,heads=16,head_bytes=8", Side(4), Side(8, 16)),
    ("layers=2,heads=1,parts=k:16/v:16", Side(2, settings=NHD), Side(3, settings=APART)),
    # Heads that the ranks cannot share evenly.
    ("layers=2,heads=5", Side(3, settings=NHD), Side(2, settings=HND)),
    ("layers=2,heads=6,parts=k:8/v:8", Side(3, stages=2), Side(2, 16, stages=2)),
    (MLA, Side(4), Side(2)),
    (MLA, Side(2, stages=3), Side(4, stages=2, broadcast=True)),
    (MLA_APART, Side(1, 16), Side(4, 4, broadcast=True)),
    # Scales beside the values.
    (
        "layers=2,heads=4,parts=k:16:int8/v:16:int8/k_scale:4:float32/v_scale:4:float32",
        Side(4, 16, NHD),
        Side(2, 8, TOGETHER),
    ),
    (
        "layers=2,heads=1,parts=nope:32:float8_e4m3/scale:4:float32/rope:16:bfloat16",
        Side(1, 16, TOGETHER),
        Side(4, 8, broadcast=True),
    ),
    # Groups with block sizes of their own.
    (f"{MLA_APART},index_layers=2", Side(4, 16), Side(2, 8, "index_block_tokens=4,order=nhd")),
    # States, sent completely at the end.
    ("layers=2,heads=4,state_layers=2,state_heads=4", Side(4), Side(2, 16, NHD)),
    (
        f"{MLA_APART},state_layers=3,state_heads=6",
        Side(3),
        Side(4, stages=2, broadcast=True),
    ),
    (
        "layers=2,heads=2,state_layers=2,state_parts=conv:6:int8/ssm:33:int8/scale:2",
        Side(2, settings=NHD),
        Side(3),
    ),
    (
        "layers=3,heads=2,parts=k:16:int8/scale:4:float32,index_layers=2,state_layers=2",
        Side(4, 16, "index_block_tokens=8"),
        Side(2, 8, NHD, stages=2),
    ),
    # Blocks that can only be copied whole.
    (OPAQUE, Side(3, settings=NHD), Side(8, settings=BLOCKS_OUTER)),
    (f"{MLA_APART},block_format=token_inner", Side(2), Side(4, broadcast=True)),
    ("layers=2,heads=2,state_layers=1,block_format=token_inner", Side(4), Side(3)),
)


class Lent:
    """A transport that stays open when its engine closes it, because closing one of Mooncake's takes a second.

    One that only sends hides its session, so that Mooncake makes no second engine for it.
    """

    def __init__(self, inner: KvTransport, *, receives: bool) -> None:
        self._inner = inner
        self.session = inner.session if receives else "receives nothing"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Ranks:
    """Mooncake transports that pairs share one after another, and the memory registered with them."""

    prefill: list[KvTransport] = field(default_factory=list)
    decode: list[KvTransport] = field(default_factory=list)
    kept: list[Pair] = field(default_factory=list)

    def lend(self, transports: list[KvTransport], number: int, *, receives: bool) -> KvTransport:
        while len(transports) <= number:
            transports.append(open_transport("mooncake", "127.0.0.1"))
        return cast("KvTransport", Lent(transports[number], receives=receives))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    held = Ranks()
    yield held
    for transport in (*held.prefill, *held.decode):
        transport.close()


def config_of(side: Side, model: str) -> dict[str, Any]:
    settings = [model, "context=256", *filter(None, [side.settings])]
    return {
        "model": f"sim:{','.join(settings)}",
        "tensor_parallel_size": side.ranks,
        "pipeline_parallel_size": side.stages,
        "block_size": side.block_tokens,
        "num_gpu_blocks_override": -(-512 // side.block_tokens),
        "max_num_batched_tokens": 48,
        "local_broadcast": side.broadcast,
    }


def check_bytes(both: Pair, handed: Handed, broadcast: bool) -> None:
    """The sent bytes are those of the plan, and all that decode needs, once. Messages about them are small."""
    layouts = (both.prefill.descriptor.layout, both.decode.descriptor.layout)
    reservation, summary, outcome = handed.reservation, handed.summary, handed.outcome
    assert summary is not None
    assert outcome is not None
    tokens = (reservation.start_token, reservation.end_token)
    assert summary.payload_bytes == planned_bytes(*layouts, reservation.transfer_id, *tokens)
    assert bool(summary.local_bytes) == broadcast
    assert summary.payload_bytes + summary.local_bytes == needed_bytes(layouts[1], *tokens)
    layers = sent_layers(outcome.reports)
    for report in outcome.reports:
        writes = sum(sent.rank == report.rank for sent in layers)
        assert report.control_bytes <= CONTROL_BYTES_MAX + writes * WRITE_CONTROL_BYTES_MAX
    assert sum(sent.times.payload_bytes for sent in layers) == summary.payload_bytes
    keys = {(sent.rank, sent.link.destination_rank, sent.times.layer) for sent in layers}
    assert keys == {
        (edge.source_rank, edge.destination_rank, layer)
        for layer, found in enumerate(edges(*layouts, reservation.transfer_id))
        for edge in found
    }
    assert all(sent.link.transport == "mooncake/tcp" for sent in layers)
    assert sum(report.payload_bytes for report in outcome.reports) == summary.payload_bytes
    for sent in layers:
        if layouts[0].group_of(sent.times.layer).kind == STATE:
            assert (sent.times.start_token, sent.times.end_token) == tokens


async def check_pairing(both: Pair, broadcast: bool) -> None:
    """A prompt in chunks, one that decode computes itself, and one with a prefix that decode has cached."""
    first = await both.generate(PROMPT)
    assert first.reservation.start_token == 0
    check_bytes(both, first, broadcast)
    alone = [*PROMPT[:SHARED_TOKENS], 7, 8, 9]
    await check_answer(both.decode, decode_work(alone, transfer_id="x2"))
    other = [*PROMPT[:SHARED_TOKENS], *range(500, 537)]
    second = await both.generate(other, transfer_id="x3")
    assert 0 < second.reservation.start_token <= SHARED_TOKENS
    check_bytes(both, second, broadcast)


@pytest.mark.parametrize(("model", "prefill", "decode"), PAIRINGS)
async def test_each_pairing_transfers_the_kv(
    ranks: Ranks, model: str, prefill: Side, decode: Side
) -> None:
    numbers = {"prefill": iter(range(64)), "decode": iter(range(64))}
    async with pair(
        prefill=config_of(prefill, model),
        decode=config_of(decode, model),
        prefill_transports=lambda: ranks.lend(
            ranks.prefill, next(numbers["prefill"]), receives=False
        ),
        decode_transports=lambda: ranks.lend(ranks.decode, next(numbers["decode"]), receives=True),
    ) as both:
        # The memory stays registered as long as Mooncake's engines exist.
        ranks.kept.append(both)
        await check_pairing(both, decode.broadcast)
