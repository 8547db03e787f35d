"""Answers that another worker began, or that start with prefill's first token or hidden state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from headrace_common.errors import KvCorrupt, TransferFailed
from headrace_engine.interface import (
    Arrived,
    DecodeEnded,
    DecodeEvent,
    DecodeTokens,
    DecodeWork,
    FirstHiddenState,
    FirstToken,
    Released,
    Sampling,
)
from headrace_engine.sim.model.sampling import hidden_state_of
from headrace_engine.sim.ranks import Ranks
from tests.component.engine.sim.support import (
    GREEDY,
    Pair,
    check_answer,
    close,
    decode_engine,
    decode_work,
    expected_tokens,
    pair,
    reserve,
    tokens_of,
)
from tests.decoding import decoded
from tests.sim_blocks import free_blocks
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
            known = both.decode.model.expected_tokens(prompt, 12, sampling)[:generated]
            local = decode_work(prompt, sampling, transfer_id=f"l{number}", generated=known)
            end = await check_answer(both.decode, local)
            handed = await both.generate(prompt, sampling, f"x{number}", generated=known)
            assert not end.stopped
            assert handed.reservation.end_token == length + generated - 1


def first_token_work(
    prompt: list[int],
    sampling: Sampling,
    transfer_id: str = "x1",
    *,
    from_hidden_state: bool = False,
) -> DecodeWork:
    return decode_work(
        prompt,
        sampling,
        transfer_id=transfer_id,
        remote_kv=True,
        awaits_first_token=True,
        from_hidden_state=from_hidden_state,
    )


async def first_by_prefill(
    both: Pair,
    prompt: list[int],
    sampling: Sampling,
    transfer_id: str = "x1",
    *,
    late: bool = False,
) -> DecodeEnded:
    """One request with prefill's first token; `late` gives it to decode after the transfer is complete."""
    token: asyncio.Future[DecodeTokens] = asyncio.get_running_loop().create_future()
    work = first_token_work(prompt, sampling, transfer_id)
    started = await both.start(work, on_first_token=token.set_result)
    # The prompt's last token is transferred even when it is cached.
    assert started.reservation.start_token < started.reservation.end_token == len(prompt)
    first = await token
    if not late:
        both.decode.transfer_event(FirstToken(transfer_id, first.token_ids[0]))
    await started.transfer.wait()
    both.decode.transfer_event(Arrived(transfer_id))
    await started.prefill
    if late:
        # The engine must not run before.
        for _ in range(20):
            await asyncio.sleep(0)
        both.decode.transfer_event(FirstToken(transfer_id, first.token_ids[0]))
    return await read_rest(both, work, first, started.reader)


async def first_from_hidden_state(
    both: Pair, prompt: list[int], sampling: Sampling, transfer_id: str = "x1"
) -> DecodeEnded:
    """One request with a first token from a hidden state, which decode must yield before the KV has arrived."""
    free = free_blocks(both.decode)
    work = first_token_work(prompt, sampling, transfer_id, from_hidden_state=True)
    started = await both.start(work)
    both.decode.transfer_event(FirstHiddenState(transfer_id, await started.transfer.hidden_state()))
    first = await anext(started.reader)
    assert isinstance(first, DecodeTokens)
    assert len(first.token_ids) == 1
    await asyncio.gather(started.transfer.wait(), started.prefill)
    both.decode.transfer_event(Arrived(transfer_id))
    end = await read_rest(both, work, first, started.reader)
    await until(lambda: free_blocks(both.decode) == free)
    return end


async def read_rest(
    both: Pair, work: DecodeWork, first: DecodeTokens, reader: AsyncIterator[DecodeEvent]
) -> DecodeEnded:
    """Reads a request to its end, and compares its tokens with the closed form."""
    assert len(first.logprobs) == (work.sampling.logprobs is not None)
    events = [first, *[event async for event in reader]]
    end = events[-1]
    assert isinstance(end, DecodeEnded)
    assert tokens_of(events) == expected_tokens(both.decode, work)
    return end


SOURCES: dict[str, Callable[..., Awaitable[DecodeEnded]]] = {
    "prefill": first_by_prefill,
    "prefill, late": partial(first_by_prefill, late=True),
    "hidden": first_from_hidden_state,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 100])
async def test_the_answer_after_a_first_token_equals_the_closed_form(
    length: int, source: str
) -> None:
    async with pair() as both:
        for number, sampling in enumerate((replace(GREEDY, max_tokens=2), SEEDED)):
            end = await SOURCES[source](both, prompt_of(length), sampling, f"x{number}")
            assert not end.stopped


@pytest.mark.parametrize("source", ["prefill", "hidden"])
@pytest.mark.parametrize(("ranks", "stages"), [((2, 1), 1), ((1, 2), 1), ((4, 1), 1), ((2, 1), 3)])
@pytest.mark.parametrize("model", MODELS)
async def test_first_tokens_come_from_one_of_several_ranks(
    model: str, ranks: tuple[int, int], stages: int, source: str
) -> None:
    """Of four ranks with two heads, some copies send no KV at all. Only the last stage has a hidden state."""
    async with pair(
        model=model,
        prefill={"tensor_parallel_size": ranks[0], "pipeline_parallel_size": stages},
        decode={"tensor_parallel_size": ranks[1]},
    ) as both:
        for number in range(4):
            await SOURCES[source](both, prompt_of(45), SEEDED, f"x{number}")


async def test_an_abort_before_the_first_token_frees_the_blocks() -> None:
    async with pair() as both:
        free = free_blocks(both.decode)
        started = await both.start(first_token_work(prompt_of(40), GREEDY))
        await asyncio.gather(started.prefill, started.transfer.wait())
        both.decode.transfer_event(Arrived("x1"))
        await close(started.reader)
        both.decode.transfer_event(FirstToken("x1", 3))
        await until(lambda: free_blocks(both.decode) == free)


@pytest.mark.parametrize("ends", ["max_tokens", "stop", "context"])
async def test_a_token_from_hidden_state_that_ends_the_answer(ends: str) -> None:
    async with pair() as both:
        prompt = prompt_of(both.decode.max_model_len - 1 if ends == "context" else 40)
        sampling = replace(GREEDY, max_tokens=1)
        if ends == "stop":
            stop = both.decode.model.expected_tokens(prompt, 1)
            sampling = replace(GREEDY, stop_token_ids=stop)
        elif ends == "context":
            sampling = GREEDY
        end = await first_from_hidden_state(both, prompt, sampling)
        assert end.stopped == (ends == "stop")


async def test_a_missing_hidden_state_fails_the_transfer_and_frees_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ranks, "hidden_states_computed", lambda *_: None)
    async with pair() as both:
        free = free_blocks(both.decode)
        started = await both.start(first_token_work(prompt_of(40), GREEDY, from_hidden_state=True))
        for failing in (started.prefill, started.transfer.hidden_state(), started.transfer.wait()):
            with pytest.raises(TransferFailed, match="the hidden state"):
                await failing
        with pytest.raises(TransferFailed):
            await anext(started.reader)
        await until(lambda: free_blocks(both.decode) == free)


async def test_one_wrong_byte_of_the_hidden_state_is_an_error() -> None:
    async with decode_engine() as engine:
        reader = decoded(engine, first_token_work(prompt_of(40), GREEDY, from_hidden_state=True))
        await reserve(reader)
        state = bytearray(hidden_state_of(12345))
        state[-1] ^= 1
        engine.transfer_event(FirstHiddenState("x1", bytes(state)))
        with pytest.raises(KvCorrupt):
            await anext(reader)
        engine.transfer_event(Released("x1"))
