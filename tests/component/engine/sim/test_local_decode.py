"""A sim engine that computes its prompts and answers alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from headrace_common.errors import (
    DecodeFull,
    Draining,
    DuplicateTransfer,
    InternalError,
    InvalidRequest,
)
from headrace_engine.interface import DecodeTokens, DecodeWork, Sampling
from headrace_engine.sim.engine import SimEngine
from tests.component.engine.sim.faults import fail_chunk
from tests.component.engine.sim.support import (
    GREEDY,
    advance_until,
    answer_of,
    check_answer,
    close,
    decode_engine,
    decode_work,
    until_running,
)
from tests.sim_clock import ManualClock
from tests.waiting import until

PROMPT = list(range(100, 139))
# On a clock that the test advances.
SLOW = "sim:context=512,prefill_s_per_token=1,decode_step_s=1"


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 64, 65, 200])
async def test_prompts_of_any_length(length: int) -> None:
    async with decode_engine() as engine:
        prompt = list(range(length))
        for transfer_id, cached in (("x1", 0), ("x2", (length - 1) // 8 * 8)):
            end = await check_answer(engine, decode_work(prompt, transfer_id=transfer_id))
            assert end.cached_tokens == cached


async def test_seeds_make_sampling_repeatable() -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=42, max_tokens=12, presence_penalty=0.5)
    async with decode_engine() as engine:
        first, _, _ = await answer_of(engine, decode_work(PROMPT, sampling))
        assert first == engine.model.expected_tokens(PROMPT, 12, sampling)
        assert first != engine.model.expected_tokens(PROMPT, 12)
        unseeded = decode_work(PROMPT, replace(sampling, seed=None))
        answers = {(await answer_of(engine, unseeded))[0] for _ in range(3)}
        assert len(answers) > 1


async def test_prompt_and_answer_are_cached() -> None:
    async with decode_engine() as engine:
        sampling = replace(GREEDY, max_tokens=20)
        tokens, _, _ = await answer_of(engine, decode_work(PROMPT, sampling))
        # The last token of an answer has no KV.
        known = (len(PROMPT) + len(tokens) - 1) // 8 * 8
        longer = [*PROMPT, *tokens, 1, 2, 3]
        end = await check_answer(engine, decode_work(longer, transfer_id="x2"))
        assert end.cached_tokens == known
        other = [*PROMPT[:20], 9, *PROMPT[21:]]
        _, end, _ = await answer_of(engine, decode_work(other, transfer_id="x3"))
        assert end.cached_tokens == 16


async def test_the_context_ends_the_answer() -> None:
    async with decode_engine(max_model_len=42) as engine:
        tokens, end, _ = await answer_of(engine, decode_work(PROMPT))
        assert tokens == engine.model.expected_tokens(PROMPT, 3)
        assert not end.stopped


async def test_logprobs_come_with_every_token() -> None:
    async with decode_engine() as engine:
        _, _, events = await answer_of(engine, decode_work(PROMPT, replace(GREEDY, logprobs=3)))
        batches = [event for event in events if isinstance(event, DecodeTokens)]
        for batch in batches:
            assert len(batch.logprobs) == len(batch.token_ids)
            for token, logprobs in zip(batch.token_ids, batch.logprobs, strict=True):
                assert logprobs.alternatives[0] == (token, logprobs.logprob)
                assert len(logprobs.alternatives) == 3


async def test_a_slow_reader_gets_tokens_joined() -> None:
    async with decode_engine() as engine:
        reader = engine.decode(decode_work(PROMPT, replace(GREEDY, max_tokens=50)))
        first = await anext(reader)
        assert isinstance(first, DecodeTokens)
        await until(lambda: engine.usage().running_requests == 0)
        rest = await anext(reader)
        assert isinstance(rest, DecodeTokens)
        together = first.token_ids + rest.token_ids
        assert together == engine.model.expected_tokens(PROMPT, 50)


@pytest.mark.parametrize("computed_s", [0.0, 1.0, len(PROMPT) + 1.0, len(PROMPT) + 9.0])
async def test_an_abort_frees_all_blocks(computed_s: float) -> None:
    clock = ManualClock()
    async with decode_engine(clock=clock, model=SLOW) as engine:
        reader = engine.decode(decode_work(PROMPT, replace(GREEDY, max_tokens=100)))
        waiter = asyncio.ensure_future(anext(reader))
        await until_running(engine)
        await clock.advance(computed_s)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await close(reader)


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


async def test_an_aborted_request_leaves_the_queue() -> None:
    async with running_request(max_num_seqs=1) as engine:
        waiting = asyncio.create_task(answer_of(engine, decode_work(PROMPT, transfer_id="x2")))
        await until(lambda: engine.usage().waiting_requests == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert engine.usage().waiting_requests == 0


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
        refused = [task for task in tasks if task.done()]
        # No time passes, so one request runs and 64 wait.
        assert 90 - 65 <= len(refused) <= 90 - 64
        for task in refused:
            assert isinstance(task.exception(), DecodeFull)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_failing_step_fails_its_requests_only() -> None:
    async with decode_engine(max_num_batched_tokens=32) as engine:
        fail_chunk(engine, 1)
        with pytest.raises(InternalError, match="chunk 1"):
            await answer_of(engine, decode_work(PROMPT))
        await check_answer(engine, decode_work([1, 2, 3], transfer_id="x2"))


@pytest.mark.parametrize(
    "work",
    [decode_work([]), decode_work(range(512)), decode_work([1], replace(GREEDY, max_tokens=0))],
)
async def test_wrong_requests_are_refused(work: DecodeWork) -> None:
    async with decode_engine() as engine:
        with pytest.raises(InvalidRequest):
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


async def test_prompts_are_computed_together_in_fair_shares() -> None:
    clock = ManualClock()
    async with decode_engine(clock=clock, model=SLOW, max_num_batched_tokens=16) as engine:
        long = asyncio.create_task(answer_of(engine, decode_work(range(300), transfer_id="l")))
        await until_running(engine)
        await clock.advance(16)
        short = asyncio.create_task(
            answer_of(engine, decode_work(range(500, 520), transfer_id="s"))
        )
        await until(lambda: engine.usage().waiting_requests == 1)
        # The short prompt gets half of each step; alone, the long one would need 300 s first.
        await advance_until(short.done, clock)
        assert not long.done()
        assert clock.now_s() < 200
        await advance_until(long.done, clock, step_s=16)
        await asyncio.gather(long, short)
