"""Answers that were begun elsewhere: by whoever generated before, or by prefill's first token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace_common.deadlines import Deadline
from headrace_engine.interface import (
    DecodeEnded,
    DecodeTokens,
    PrefillWork,
    Sampling,
)
from headrace_kv.transfer import Reservation
from tests.component.sim.support import (
    GREEDY,
    Pair,
    answer_of,
    decode_engine,
    decode_work,
    pair,
    until,
)

SEEDED = Sampling(
    temperature=0.8,
    top_p=0.9,
    seed=42,
    max_tokens=12,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    logprobs=2,
)
MODELS = (
    "sim:layers=3,heads=2,context=512",
    "sim:layers=3,heads=2,context=512,state_layers=2,state_heads=2",
)


def prompt_of(length: int) -> list[int]:
    return [(7 * number + length) % 251 for number in range(length)]


@pytest.mark.parametrize("generated", [1, 2, 7, 11])
@pytest.mark.parametrize("length", [1, 7, 8, 30])
async def test_an_answer_goes_on_as_if_never_interrupted(length: int, generated: int) -> None:
    prompt = prompt_of(length)
    async with pair() as both:
        for number, sampling in enumerate((replace(GREEDY, max_tokens=12), SEEDED)):
            whole = both.decode.model.expected_tokens(prompt, 12, sampling)
            local = decode_work(
                prompt, sampling, transfer_id=f"l{number}", generated=whole[:generated]
            )
            tokens, end, _ = await answer_of(both.decode, local)
            handed = await both.generate(
                prompt, sampling, f"x{number}", generated=whole[:generated]
            )
            assert tokens == handed.tokens == whole[generated:]
            assert not end.stopped
            assert handed.reservation.end_token == length + generated - 1


async def test_a_stop_token_ends_an_answer_that_goes_on() -> None:
    prompt = prompt_of(20)
    async with decode_engine() as engine:
        whole = engine.model.expected_tokens(prompt, 6)
        sampling = replace(GREEDY, stop_token_ids=(whole[4],))
        work = decode_work(prompt, sampling, generated=whole[:2])
        tokens, end, _ = await answer_of(engine, work)
        assert tokens == whole[2 : whole.index(whole[4]) + 1]
        assert end.stopped


async def first_by_prefill(
    both: Pair, prompt: list[int], sampling: Sampling, transfer_id: str, *, late: bool = False
) -> tuple[tuple[int, ...], Reservation]:
    """One request whose first token prefill makes; `late` says it after the transfer is whole."""
    work = decode_work(
        prompt, sampling, transfer_id=transfer_id, remote_kv=True, awaits_first_token=True
    )
    reader = both.decode.decode(work)
    reservation = await anext(reader)
    assert isinstance(reservation, Reservation)
    transfer = both.receiver.reserve(reservation, Deadline.after(20.0))
    told: asyncio.Future[DecodeTokens] = asyncio.get_running_loop().create_future()
    prefill = asyncio.create_task(
        both.prefill.prefill(
            PrefillWork(tuple(prompt), both.target(reservation), sampling), told.set_result
        )
    )
    first = await told
    assert len(first.logprobs) == (sampling.logprobs is not None)
    if not late:
        both.decode.first_token(transfer_id, first.token_ids[0])
    await transfer.wait()
    both.decode.arrived(transfer_id)
    await prefill
    if late:
        await asyncio.sleep(0.05)
        both.decode.first_token(transfer_id, first.token_ids[0])
    tokens = list(first.token_ids)
    async for event in reader:
        if isinstance(event, DecodeTokens):
            tokens += event.token_ids
        elif isinstance(event, DecodeEnded):
            break
    await reader.aclose()  # type: ignore[attr-defined]
    return tuple(tokens), reservation


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 100])
async def test_prefills_first_token_begins_the_closed_forms_answer(length: int, late: bool) -> None:
    prompt = prompt_of(length)
    async with pair() as both:
        for number, sampling in enumerate((replace(GREEDY, max_tokens=2), SEEDED)):
            whole = both.decode.model.expected_tokens(prompt, sampling.max_tokens, sampling)
            tokens, reservation = await first_by_prefill(
                both, prompt, sampling, f"x{number}", late=late
            )
            assert tokens == whole
            # Whatever is cached, the token before the first one is handed over.
            assert reservation.start_token < reservation.end_token == length


@pytest.mark.parametrize("model", MODELS)
async def test_prefills_first_token_with_more_ranks_and_states(model: str) -> None:
    prompt = prompt_of(45)
    async with pair(
        model=model, prefill={"tensor_parallel_size": 2}, decode={"tensor_parallel_size": 1}
    ) as both:
        whole = both.decode.model.expected_tokens(prompt, 12, SEEDED)
        tokens, _ = await first_by_prefill(both, prompt, SEEDED, "x1")
        assert tokens == whole


async def test_giving_up_a_request_that_awaits_its_first_token_frees_its_blocks() -> None:
    prompt = prompt_of(40)
    async with pair() as both:
        free = both.decode.free_block_count()
        work = decode_work(prompt, remote_kv=True, awaits_first_token=True)
        reader = both.decode.decode(work)
        reservation = await anext(reader)
        assert isinstance(reservation, Reservation)
        transfer = both.receiver.reserve(reservation, Deadline.after(20.0))
        await both.prefill.prefill(PrefillWork(tuple(prompt), both.target(reservation)))
        await transfer.wait()
        both.decode.arrived("x1")
        await reader.aclose()  # type: ignore[attr-defined]
        both.decode.first_token("x1", 3)
        await until(lambda: both.decode.free_block_count() == free)
