"""Answers that another worker began, or that start with prefill's first token or logits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import KvCorrupt, TransferFailed
from headrace_engine.interface import (
    DecodeEnded,
    DecodeTokens,
    DecodeWork,
    PrefillWork,
    Sampling,
)
from headrace_engine.sim.faults import SimFaults
from headrace_engine.sim.model.logits import logits_of
from headrace_kv.handoff.messages import Reservation
from tests.component.engine.sim.support import (
    GREEDY,
    Pair,
    answer_of,
    close,
    decode_engine,
    decode_work,
    pair,
    reserve,
)
from tests.waiting import until

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
async def test_a_continued_answer_equals_an_uninterrupted_one(length: int, generated: int) -> None:
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


async def test_a_stop_token_ends_a_continued_answer() -> None:
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
    """One request with prefill's first token; `late` gives it to decode after the transfer is complete."""
    work = decode_work(
        prompt, sampling, transfer_id=transfer_id, remote_kv=True, awaits_first_token=True
    )
    reader = both.decode.decode(work)
    reservation = await reserve(reader)
    transfer = both.receiver.reserve(reservation, Deadline.after(20.0))
    token: asyncio.Future[DecodeTokens] = asyncio.get_running_loop().create_future()
    prefill = asyncio.create_task(
        both.prefill.prefill(
            PrefillWork(tuple(prompt), both.target(reservation), sampling), token.set_result
        )
    )
    first = await token
    assert len(first.logprobs) == (sampling.logprobs is not None)
    if not late:
        both.decode.first_token(transfer_id, first.token_ids[0])
    await transfer.wait()
    both.decode.arrived(transfer_id)
    await prefill
    if late:
        # The engine must not run before.
        for _ in range(20):
            await asyncio.sleep(0)
        both.decode.first_token(transfer_id, first.token_ids[0])
    tokens = list(first.token_ids)
    async for event in reader:
        if isinstance(event, DecodeTokens):
            tokens += event.token_ids
        elif isinstance(event, DecodeEnded):
            break
    await close(reader)
    return tuple(tokens), reservation


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 100])
async def test_the_answer_after_the_first_token_of_prefill_equals_the_closed_form(
    length: int, late: bool
) -> None:
    prompt = prompt_of(length)
    async with pair() as both:
        for number, sampling in enumerate((replace(GREEDY, max_tokens=2), SEEDED)):
            whole = both.decode.model.expected_tokens(prompt, sampling.max_tokens, sampling)
            tokens, reservation = await first_by_prefill(
                both, prompt, sampling, f"x{number}", late=late
            )
            assert tokens == whole
            # The prompt's last token is transferred even when it is cached.
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


async def test_an_abort_before_the_first_token_frees_the_blocks() -> None:
    prompt = prompt_of(40)
    async with pair() as both:
        free = both.decode.free_block_count()
        work = decode_work(prompt, remote_kv=True, awaits_first_token=True)
        reader = both.decode.decode(work)
        reservation = await reserve(reader)
        transfer = both.receiver.reserve(reservation, Deadline.after(20.0))
        await both.prefill.prefill(PrefillWork(tuple(prompt), both.target(reservation)))
        await transfer.wait()
        both.decode.arrived("x1")
        await close(reader)
        both.decode.first_token("x1", 3)
        await until(lambda: both.decode.free_block_count() == free)


# The first token from logits.


async def first_from_logits(
    both: Pair, prompt: list[int], sampling: Sampling, transfer_id: str
) -> tuple[tuple[int, ...], DecodeEnded, int]:
    """Runs one request as the services do. Returns also how many tokens came before `arrived`."""
    free = both.decode.free_block_count()
    reader = both.decode.decode(from_logits(prompt, sampling, transfer_id))
    reservation = await reserve(reader)
    transfer = both.receiver.reserve(
        reservation, Deadline.after(20.0), logits_bytes=both.decode.logits_bytes
    )
    target = replace(both.target(reservation), with_logits=True)
    prefill = asyncio.create_task(both.prefill.prefill(PrefillWork(tuple(prompt), target)))
    both.decode.first_logits(transfer_id, await transfer.logits())
    first = await anext(reader)
    assert isinstance(first, DecodeTokens)
    assert len(first.logprobs) == (sampling.logprobs is not None)
    tokens = list(first.token_ids)
    await asyncio.gather(transfer.wait(), prefill)
    both.decode.arrived(transfer_id)
    ended: DecodeEnded | None = None
    async for event in reader:
        if isinstance(event, DecodeTokens):
            tokens += event.token_ids
        elif isinstance(event, DecodeEnded):
            ended = event
            break
    await close(reader)
    await until(lambda: both.decode.free_block_count() == free)
    assert ended is not None
    return tuple(tokens), ended, len(first.token_ids)


def from_logits(prompt: list[int], sampling: Sampling, transfer_id: str) -> DecodeWork:
    return decode_work(
        prompt,
        sampling,
        transfer_id=transfer_id,
        remote_kv=True,
        awaits_first_token=True,
        from_logits=True,
    )


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 100])
async def test_the_answer_after_a_first_token_from_logits_equals_the_closed_form(
    length: int,
) -> None:
    prompt = prompt_of(length)
    async with pair() as both:
        model = both.decode.model
        for number, sampling in enumerate((replace(GREEDY, max_tokens=2), SEEDED)):
            whole = model.expected_tokens(prompt, sampling.max_tokens, sampling)
            tokens, end, before_kv = await first_from_logits(both, prompt, sampling, f"x{number}")
            assert tokens == whole
            assert before_kv == 1
            assert not end.stopped


@pytest.mark.parametrize("ends", ["max_tokens", "stop", "context"])
async def test_a_token_from_logits_that_ends_the_answer(ends: str) -> None:
    async with pair() as both:
        length = both.decode.max_model_len - 1 if ends == "context" else 40
        prompt = prompt_of(length)
        first = both.decode.model.expected_tokens(prompt, 1)
        sampling = {
            "max_tokens": replace(GREEDY, max_tokens=1),
            "stop": replace(GREEDY, stop_token_ids=first),
            "context": GREEDY,
        }[ends]
        tokens, end, _ = await first_from_logits(both, prompt, sampling, "x1")
        assert tokens == first
        assert end.stopped == (ends == "stop")


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (4, 1)])
@pytest.mark.parametrize("model", MODELS)
async def test_logits_come_from_one_of_several_ranks(model: str, ranks: tuple[int, int]) -> None:
    """Of four ranks with two heads, some copies send no KV at all."""
    prefill_ranks, decode_ranks = ranks
    prompt = prompt_of(45)
    async with pair(
        model=model,
        prefill={"tensor_parallel_size": prefill_ranks},
        decode={"tensor_parallel_size": decode_ranks},
    ) as both:
        for number in range(4):
            whole = both.decode.model.expected_tokens(prompt, 12, SEEDED)
            tokens, _, _ = await first_from_logits(both, prompt, SEEDED, f"x{number}")
            assert tokens == whole


async def test_missing_logits_fail_the_transfer_and_free_its_blocks() -> None:
    prompt = prompt_of(40)
    async with pair(prefill_faults=SimFaults(lose_logits=True)) as both:
        free = both.decode.free_block_count()
        reader = both.decode.decode(from_logits(prompt, GREEDY, "x1"))
        reservation = await reserve(reader)
        transfer = both.receiver.reserve(
            reservation, Deadline.after(20.0), logits_bytes=both.decode.logits_bytes
        )
        target = replace(both.target(reservation), with_logits=True)
        with pytest.raises(TransferFailed, match="the logits"):
            await both.prefill.prefill(PrefillWork(tuple(prompt), target))
        with pytest.raises(TransferFailed, match="the logits"):
            await transfer.logits()
        with pytest.raises(TransferFailed, match="the logits"):
            await transfer.wait()
        with pytest.raises(TransferFailed):
            await anext(reader)
        await until(lambda: both.decode.free_block_count() == free)


async def test_one_wrong_byte_of_the_logits_is_an_error() -> None:
    async with pair() as both:
        reader = both.decode.decode(from_logits(prompt_of(40), GREEDY, "x1"))
        reservation = await anext(reader)
        logits = bytearray(logits_of(12345, both.decode.model.vocabulary))
        logits[-1] ^= 1
        both.decode.first_logits("x1", bytes(logits))
        with pytest.raises(KvCorrupt):
            await anext(reader)
        assert isinstance(reservation, Reservation)
        both.decode.released("x1")
