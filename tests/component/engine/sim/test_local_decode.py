"""A sim engine that computes its prompts and answers alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from headrace_common.errors import DecodeFull, Draining, DuplicateTransfer, InvalidRequest
from headrace_common.registry.adapters import Adapter
from headrace_engine.interface import DecodeTokens, DecodeWork, Sampling
from headrace_engine.sim.engine import SimEngine
from tests.component.engine.sim.support import (
    GREEDY,
    advance_until,
    answer_of,
    check_answer,
    decode_engine,
    decode_work,
    pair,
    until_running,
)
from tests.sim_clock import ManualClock
from tests.waiting import until

PROMPT = list(range(100, 139))
# On a clock that the test advances.
SLOW = "sim:context=512,prefill_s_per_token=1,decode_step_s=1"


async def test_seeds_make_sampling_repeatable() -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=42, max_tokens=12, presence_penalty=0.5)
    async with decode_engine() as engine:
        first, _, _ = await answer_of(engine, decode_work(PROMPT, sampling))
        assert first == engine.model.expected_tokens(PROMPT, 12, sampling)
        assert first != engine.model.expected_tokens(PROMPT, 12)
        unseeded = decode_work(PROMPT, replace(sampling, seed=None))
        answers = {(await answer_of(engine, unseeded))[0] for _ in range(3)}
        assert len(answers) > 1


@asynccontextmanager
async def running_request(**changes: Any) -> AsyncIterator[SimEngine]:
    """An engine with a request that runs until the end, when its answer must be correct."""
    clock = ManualClock()
    async with decode_engine(clock=clock, model=SLOW, **changes) as engine:
        running = asyncio.create_task(check_answer(engine, decode_work(PROMPT)))
        await until_running(engine)
        yield engine
        await advance_until(running.done, clock)
        await running


async def test_a_transfer_id_cannot_be_used_twice_at_a_time() -> None:
    async with running_request() as engine:
        with pytest.raises(DuplicateTransfer):
            await answer_of(engine, decode_work(PROMPT))


async def test_the_queue_is_bounded() -> None:
    async with decode_engine(clock=ManualClock(), max_num_seqs=1, model=SLOW) as engine:
        tasks = [
            asyncio.create_task(answer_of(engine, decode_work([1, 2], transfer_id=f"x{number}")))
            for number in range(90)
        ]
        await until_running(engine)
        await until(lambda: sum(task.done() for task in tasks) >= 90 - 65)
        refused = [task for task in tasks if task.done()]
        # No time passes, so one request runs and 64 wait.
        assert 90 - 65 <= len(refused) <= 90 - 64
        for task in refused:
            assert isinstance(task.exception(), DecodeFull)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (decode_work([]), "token_ids"),
        (decode_work(range(512)), "token_ids"),
        (decode_work([1], replace(GREEDY, max_tokens=0)), "max_tokens"),
        (decode_work([1], adapter=Adapter("painter", "0a")), "no adapter 'painter'"),
    ],
)
async def test_wrong_requests_are_refused(work: DecodeWork, words: str) -> None:
    async with decode_engine() as engine:
        with pytest.raises(InvalidRequest, match=words):
            await answer_of(engine, work)


async def test_closing_ends_running_requests_and_refuses_more() -> None:
    async with decode_engine(clock=ManualClock(), model=SLOW) as engine:
        running = asyncio.create_task(check_answer(engine, decode_work(PROMPT)))
        await until_running(engine)
        await engine.close()
        with pytest.raises(Draining):
            await running
        with pytest.raises(Draining):
            await answer_of(engine, decode_work(PROMPT, transfer_id="x2"))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("states", [0, 2])
async def test_a_prompt_has_the_logprobs_that_its_tokens_had_in_an_answer(
    verify: bool, states: int
) -> None:
    model = f"sim:context=512,state_layers={states}" + ("" if verify else ",verify=off")
    sampling = Sampling(temperature=0.0, max_tokens=8, logprobs=3)
    async with pair(model=model, guarded=verify) as both:
        engine = both.decode
        answer, _, events = await answer_of(engine, decode_work(PROMPT, sampling))
        generated = [
            entry for event in events if isinstance(event, DecodeTokens) for entry in event.logprobs
        ]
        prompt = [*PROMPT, *answer]
        scoring = replace(sampling, max_tokens=2, logprobs=None, prompt_logprobs=3)
        work = decode_work(prompt, scoring, transfer_id="x2")
        following, end, events = await answer_of(engine, work)
        assert following == engine.model.expected_tokens(prompt, 2)
        first = events[0]
        assert isinstance(first, DecodeTokens)
        assert len(first.prompt_logprobs) == len(prompt) - 1
        assert [replace(entry, rank=0) for entry in first.prompt_logprobs[-8:]] == generated
        assert {entry.rank for entry in first.prompt_logprobs[-8:]} == {1}
        # Tokens that it would not have chosen.
        assert all(entry.rank > 1 for entry in first.prompt_logprobs[:-8])
        assert end.cached_tokens == 0
        if not states:
            plain = decode_work(prompt, replace(scoring, prompt_logprobs=None), transfer_id="x3")
            _, end, _ = await answer_of(engine, plain)
            assert end.cached_tokens > 0
