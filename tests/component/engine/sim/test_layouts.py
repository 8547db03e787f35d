"""Layouts with several parts, caches and states: wrong bytes, reuse, mismatches and cancellation."""

from __future__ import annotations

import pytest

from headrace_engine.sim.model.settings import SimSettings, parse_settings
from headrace_kv.layout.layout import STATE
from tests.component.engine.sim.faults import CorruptByte, corrupt_arrived
from tests.component.engine.sim.support import (
    EVERYTHING,
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
