"""Pairs of different layouts, from engine to engine over Mooncake's TCP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from headrace_kv.layout.layout import STATE
from headrace_kv.plan.shard_map import expected_keys
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from tests.component.engine.sim.pairings import MODELS, PAIRINGS, Pairing, Side
from tests.component.engine.sim.support import (
    Handed,
    Pair,
    check_answer,
    decode_work,
    needed_bytes,
    pair,
    planned_bytes,
)

PROMPT = list(range(100, 161))
# Whole blocks of most sizes, and part of one.
SHARED_TOKENS = 50


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
    settings = [MODELS[model], "context=256", *filter(None, [side.settings])]
    return {
        "model": f"sim:{','.join(settings)}",
        "tensor_parallel_size": side.ranks,
        "block_size": side.block_tokens,
        "num_gpu_blocks_override": -(-512 // side.block_tokens),
        "max_num_batched_tokens": 48,
        "local_broadcast": side.broadcast,
    }


def check_bytes(both: Pair, handed: Handed, broadcast: bool) -> None:
    """The sent bytes are those of the plan, and all that decode needs, once."""
    layouts = (both.prefill.descriptor.layout, both.decode.descriptor.layout)
    reservation, summary, outcome = handed.reservation, handed.summary, handed.outcome
    assert summary is not None
    assert outcome is not None
    tokens = (reservation.start_token, reservation.end_token)
    assert summary.payload_bytes == planned_bytes(*layouts, reservation.transfer_id, *tokens)
    assert bool(summary.local_bytes) == broadcast
    assert summary.payload_bytes + summary.local_bytes == needed_bytes(layouts[1], *tokens)
    assert sum(sent.payload_bytes for _, sent in outcome.layers) == summary.payload_bytes
    keys = {(rank, sent.destination_rank, sent.layer) for rank, sent in outcome.layers}
    assert keys == expected_keys(*layouts, reservation.transfer_id)
    assert all(sent.link.transport == "mooncake/tcp" for _, sent in outcome.layers)
    assert sum(report.payload_bytes for report in outcome.reports) == summary.payload_bytes
    for _, sent in outcome.layers:
        if layouts[0].group_of(sent.layer).kind == STATE:
            assert (sent.start_token, sent.end_token) == tokens


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


@pytest.mark.parametrize("pairing", PAIRINGS, ids=str)
async def test_each_pairing_transfers_the_kv(ranks: Ranks, pairing: Pairing) -> None:
    numbers = {"prefill": iter(range(64)), "decode": iter(range(64))}
    async with pair(
        prefill=config_of(pairing.prefill, pairing.model),
        decode=config_of(pairing.decode, pairing.model),
        prefill_transports=lambda: ranks.lend(
            ranks.prefill, next(numbers["prefill"]), receives=False
        ),
        decode_transports=lambda: ranks.lend(ranks.decode, next(numbers["decode"]), receives=True),
    ) as both:
        # The memory stays registered as long as Mooncake's engines exist.
        ranks.kept.append(both)
        await check_pairing(both, pairing.decode.broadcast)
