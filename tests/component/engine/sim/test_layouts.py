"""Layouts with several parts, caches and states: wrong bytes, reuse, mismatches and cancellation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, LayoutMismatch
from headrace_engine.interface import PrefillWork
from headrace_engine.sim.clock import ManualClock
from headrace_engine.sim.engine import SimEngine
from headrace_engine.sim.faults import CorruptByte, SimFaults
from headrace_engine.sim.model.settings import SimSettings, parse_settings
from headrace_kv.layout.compatibility import layout_differences
from headrace_kv.layout.layout import STATE
from headrace_kv.transport.in_memory import Fault, FaultKind, FaultPlan, InMemoryTransport
from tests.component.engine.sim.support import (
    GREEDY,
    answer_of,
    cancel_at_random,
    close,
    decode_engine,
    decode_work,
    engine_config,
    no_descriptors,
    pair,
    reserve,
)

PROMPT = list(range(100, 150))
EVERYTHING = (
    "sim:layers=2,heads=2,parts=k:16:int8/v:12:int8/scale:4:float32,index_layers=1,state_layers=2,"
    "state_parts=conv:6/ssm:64,context=512"
)
WITH_STATE = "sim:layers=2,state_layers=1,context=512"


def parts_of(settings: SimSettings) -> list[tuple[int, str, int]]:
    """(layer, part, its last byte) of every part of every layer."""
    return [
        (layer, part.name, part.nbytes - 1)
        for cache in settings.caches
        for layer in cache.layers
        for part in cache.parts
    ]


def token_in(settings: SimSettings, layer: int, token: int) -> int:
    """A valid token for the layer: a state has only token 0."""
    states = {at for cache in settings.caches if cache.kind == STATE for at in cache.layers}
    return 0 if layer in states else token


@pytest.mark.parametrize("layer, part, byte", parts_of(parse_settings(EVERYTHING)))
@pytest.mark.parametrize("placement", ["order=nhd,stages=1", "block_format=token_inner,stages=2"])
async def test_a_corrupt_byte_of_any_part_changes_the_answer(
    placement: str, layer: int, part: str, byte: int
) -> None:
    model = f"{EVERYTHING},{placement}"
    settings = parse_settings(model)
    starts = [at * settings.layer_count // settings.stages for at in range(settings.stages)]
    stage = max(at for at, start in enumerate(starts) if start <= layer)
    token = token_in(settings, layer, 37)
    corrupt = CorruptByte(rank=2 * stage + 1, layer=layer, part=part, token=token, byte=byte)
    async with pair(
        model=model,
        decode={"tensor_parallel_size": 2},
        decode_faults=SimFaults(corrupt=corrupt),
    ) as both:
        handed = await both.generate(PROMPT)
        assert handed.tokens != both.decode.model.expected_tokens(PROMPT, 6)


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_dropped_layer_or_state_changes_the_answer(number: int) -> None:
    def transport() -> InMemoryTransport:
        return InMemoryTransport(FaultPlan(by_write={number: Fault(FaultKind.DROP)}))

    async with pair(model=WITH_STATE, prefill_transports=transport, digest="off") as both:
        handed = await both.generate(PROMPT)
        assert handed.tokens != both.decode.model.expected_tokens(PROMPT, 6)


@pytest.mark.parametrize(
    "model", [EVERYTHING, WITH_STATE, f"{EVERYTHING},block_format=token_inner"]
)
@pytest.mark.parametrize("ranks", [1, 3])
async def test_local_answers_equal_the_closed_form(model: str, ranks: int) -> None:
    async with decode_engine(model=model, tensor_parallel_size=ranks) as engine:
        for number, length in enumerate((1, 2, 8, 9, 64, 65, 130)):
            prompt = list(range(length))
            work = decode_work(prompt, transfer_id=f"x{number}")
            tokens, end, _ = await answer_of(engine, work)
            assert tokens == engine.model.expected_tokens(prompt, 6)
            # A state has to be computed from the first token on.
            assert end.cached_tokens == 0


@pytest.mark.parametrize("length", [1, 2, 9, 17, 18, 33])
async def test_cached_blocks_are_not_sent_but_the_state_always_is(length: int) -> None:
    async with pair(model=WITH_STATE) as both:
        prompt = PROMPT[:length]
        for number, start in enumerate((0, max(0, length - 2) // 8 * 8)):
            handed = await both.generate(prompt, transfer_id=f"x{number}")
            assert handed.tokens == both.decode.model.expected_tokens(prompt, 6)
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
        handed = await both.generate(PROMPT, replace(GREEDY, max_tokens=60))
        assert handed.tokens == both.decode.model.expected_tokens(PROMPT, 60)


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
    async with pair(
        prefill={"model": f"sim:context=512,{prefill}"},
        decode={"model": f"sim:context=512,{decode}"},
    ) as both:
        reader = both.decode.decode(decode_work(PROMPT, remote_kv=True))
        reservation = await reserve(reader)
        transfer = both.receiver.reserve(reservation, Deadline.after(20.0))
        work = PrefillWork(tuple(PROMPT[:-1]), both.target(reservation))
        with pytest.raises(LayoutMismatch, match=field):
            await both.prefill.prefill(work)
        both.receiver.cancel("x1", "CANCELLED", "no worker can prefill")
        with pytest.raises(HeadraceError):
            await transfer.wait()
        await close(reader)


async def test_opaque_blocks_of_different_sizes_are_incompatible() -> None:
    layouts = []
    for block_tokens in (8, 16):
        model = "sim:block_format=token_inner,context=512"
        config = engine_config("decode", model=model, block_size=block_tokens)
        engine = SimEngine(config, no_descriptors)
        await engine.start()
        layouts.append(engine.descriptor.layout)
        await engine.close()
    assert set(layout_differences(*layouts)) == {
        "attention.block_tokens",
        "attention.kv.unit_bytes",
    }


@pytest.mark.parametrize("seed", range(2))
async def test_random_cancellations_leak_no_block_and_no_page(seed: int) -> None:
    clock = ManualClock()
    async with pair(
        model=f"{EVERYTHING},prefill_s_per_token=0.1,decode_step_s=1",
        prefill={"tensor_parallel_size": 2, "num_gpu_blocks_override": 30},
        decode={"num_gpu_blocks_override": 40},
        max_num_batched_tokens=16,
        max_num_seqs=5,
        prefill_clock=clock,
        decode_clock=clock,
    ) as both:
        await cancel_at_random(both, clock, count=30, seed=seed, ticks=30)
