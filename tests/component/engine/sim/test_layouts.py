"""Layouts with several parts, caches and states: wrong bytes, reuse, mismatches and cancellation."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_common.errors import HeadraceError, LayoutMismatch
from headrace_engine.sim.model.settings import SimSettings, parse_settings
from headrace_kv.layout.layout import STATE
from tests.component.engine.sim.faults import CorruptByte, corrupt_arrived
from tests.component.engine.sim.support import (
    EVERYTHING,
    close,
    decode_work,
    pair,
)

PROMPT = list(range(100, 150))


def parts_of(settings: SimSettings) -> list[tuple[int, str, int, int]]:
    """(layer, part, its last byte, a token) of every part of every layer. A state has only token 0."""
    return [
        (layer, part.name, part.nbytes - 1, 0 if cache.kind == STATE else 37)
        for cache in settings.caches
        for layer in cache.layers
        for part in cache.parts
    ]


@pytest.mark.parametrize("layer, part, byte, token", parts_of(parse_settings(EVERYTHING)))
@pytest.mark.parametrize("placement", ["order=nhd,stages=1", "block_format=token_inner,stages=2"])
async def test_a_corrupt_byte_of_any_part_changes_the_answer(
    placement: str, layer: int, part: str, byte: int, token: int
) -> None:
    model = f"{EVERYTHING},{placement}"
    settings = parse_settings(model)
    starts = [at * settings.layer_count // settings.stages for at in range(settings.stages)]
    stage = max(at for at, start in enumerate(starts) if start <= layer)
    corrupt = CorruptByte(rank=2 * stage + 1, layer=layer, part=part, token=token, byte=byte)
    async with pair(model=model, decode={"tensor_parallel_size": 2}) as both:
        corrupt_arrived(both.decode, corrupt)
        handed = await both.generate(PROMPT, check=False)
        assert handed.tokens != both.decode.model.expected_tokens(PROMPT, 6)


@pytest.mark.parametrize(
    "prefill, decode, field",
    [
        ("parts=k:16", "parts=k:16:int8", "attention.k.dtype"),
        ("parts=k:16", "parts=k:8", "attention.k.unit_bytes"),
        ("parts=k:16", "parts=v:16", "attention.parts"),
        ("heads=2", "heads=4", "attention.head_count"),
        ("layers=2", "layers=3", "attention.layers"),
        ("layers=2", "block_format=token_inner", "attention.kv.block_format"),
        ("state_layers=0", "state_layers=1", "groups"),
        ("state_layers=1", "state_layers=1,state_heads=3", "state.head_count"),
        ("index_layers=1", "index_layers=1,index_parts=key:8", "index.key.unit_bytes"),
        ("vocabulary=100", "vocabulary=101", "model"),
    ],
)
async def test_incompatible_workers_get_an_error_that_names_the_field(
    prefill: str, decode: str, field: str
) -> None:
    await check_mismatch(
        {"model": f"sim:context=512,{prefill}"}, {"model": f"sim:context=512,{decode}"}, field
    )


async def check_mismatch(prefill: dict[str, Any], decode: dict[str, Any], field: str) -> None:
    async with pair(prefill=prefill, decode=decode) as both:
        started = await both.start(decode_work(PROMPT, remote_kv=True))
        with pytest.raises(LayoutMismatch, match=field):
            await started.prefill
        both.receiver.cancel("x1", "CANCELLED", "no worker can prefill")
        with pytest.raises(HeadraceError):
            await started.transfer.wait()
        await close(started.reader)
