"""Layouts with several parts, caches and states: wrong bytes, reuse, mismatches and cancellation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace_common.errors import HeadraceError, LayoutMismatch
from headrace_engine.sim.model.settings import SimSettings, parse_settings
from headrace_kv.layout.layout import STATE
from headrace_kv.transport.in_memory import Fault, FaultKind, FaultPlan, InMemoryTransport
from tests.component.engine.sim.faults import CorruptByte, corrupt_arrived
from tests.component.engine.sim.support import (
    EVERYTHING,
    GREEDY,
    check_answer,
    close,
    decode_engine,
    decode_work,
    pair,
    reserve,
)

PROMPT = list(range(100, 150))
WITH_STATE = "sim:layers=2,state_layers=1,context=512"


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


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_dropped_layer_or_state_changes_the_answer(number: int) -> None:
    def transport() -> InMemoryTransport:
        return InMemoryTransport(FaultPlan(by_write={number: Fault(FaultKind.DROP)}))

    async with pair(model=WITH_STATE, prefill_transports=transport, digest="off") as both:
        handed = await both.generate(PROMPT, check=False)
        assert handed.tokens != both.decode.model.expected_tokens(PROMPT, 6)


@pytest.mark.parametrize(
    "model", [EVERYTHING, WITH_STATE, f"{EVERYTHING},block_format=token_inner"]
)
@pytest.mark.parametrize("ranks", [1, 3])
async def test_local_answers_equal_the_closed_form(model: str, ranks: int) -> None:
    async with decode_engine(model=model, tensor_parallel_size=ranks) as engine:
        for number, length in enumerate((1, 2, 8, 9, 64, 65, 130)):
            prompt = list(range(length))
            end = await check_answer(engine, decode_work(prompt, transfer_id=f"x{number}"))
            # A state has to be computed from the first token on.
            assert end.cached_tokens == 0


@pytest.mark.parametrize("length", [1, 2, 9, 17, 18, 33])
async def test_cached_blocks_are_not_sent_but_the_state_always_is(length: int) -> None:
    async with pair(model=WITH_STATE) as both:
        prompt = PROMPT[:length]
        for number, start in enumerate((0, max(0, length - 2) // 8 * 8)):
            handed = await both.generate(prompt, transfer_id=f"x{number}")
            reservation = handed.reservation
            assert (reservation.start_token, reservation.end_token) == (start, length - 1)
            assert handed.end.cached_tokens == start
            if length == 1:
                assert handed.outcome is None
                continue
            assert len(reservation.further_block_ids) == 1
            assert len(reservation.further_block_ids[0]) == 1
            assert handed.outcome is not None
            assert handed.outcome.cached_tokens == 0
            states = [sent for _, sent in handed.outcome.layers if sent.layer == 1]
            assert [sent.payload_bytes for sent in states] == [2 * (24 + 64)]


async def test_a_state_advances_over_many_tokens() -> None:
    async with pair(model=EVERYTHING, decode={"tensor_parallel_size": 3}) as both:
        await both.generate(PROMPT, replace(GREEDY, max_tokens=60))


async def test_a_reservation_names_the_blocks_of_every_group() -> None:
    model = f"{EVERYTHING},index_block_tokens=12"
    async with decode_engine(model=model) as engine:
        reader = engine.decode(decode_work(PROMPT, remote_kv=True))
        reservation = await reserve(reader)
        assert [len(ids) for ids in reservation.block_ids_by_group] == [7, 5, 1]
        assert reservation.find_fault(engine.descriptor.layout) == ""
        await close(reader)
        engine.released("x1")


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


async def test_opaque_blocks_of_different_sizes_are_incompatible() -> None:
    opaque = "sim:block_format=token_inner,context=512"
    await check_mismatch(
        {"model": opaque}, {"model": opaque, "block_size": 16}, "attention.block_tokens"
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
