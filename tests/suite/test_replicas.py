"""Two routers over one registry: both have every worker, and the end of one affects only its own streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace_common.errors import HeadraceError
from tests.suite.deployment import Outcome, Suite, greedy, prompt_of, suite

STREAMS = 6
TOKENS = 150
"""About 6 s: every stream starts long before any stream ends."""
SETTINGS = (("decode", "model", "sim:decode_step_s=0.04"), ("decode", "max_num_seqs", "32"))


@asynccontextmanager
async def _with_two_routers(folder: Path) -> AsyncIterator[tuple[Suite, Suite]]:
    """The same deployment through either router."""
    async with (
        suite(folder, decode_count=2, settings=SETTINGS) as it,
        it.through(await it.add("router-1", "router")) as other,
    ):
        await other.wait_joined(1, 2)
        yield it, other


async def _held_tokens(it: Suite, seed: int) -> dict[str, int]:
    """The load of the decode workers as this router has it."""
    routed = await it.client.explain(greedy(prompt_of(50, seed), 1))
    return {candidate.worker_id: candidate.held_tokens for candidate in routed.candidates}


async def _answer(it: Suite, seed: int, started: asyncio.Event) -> Outcome:
    prompt = prompt_of(60 + seed, seed)
    outcome = await it.generate(prompt, TOKENS, started=started)
    assert outcome.token_ids == it.expected(prompt, TOKENS)
    return outcome


async def _begun(it: Suite, seed: int) -> asyncio.Task[Outcome]:
    """A stream that has received a token, and checks every token."""
    started = asyncio.Event()
    running = asyncio.create_task(_answer(it, seed, started))
    async with asyncio.timeout(10):
        await started.wait()
    return running


async def test_a_router_sees_the_load_of_the_other(tmp_path: Path) -> None:
    async with _with_two_routers(tmp_path) as (it, other):
        running = await _begun(it, 400)
        async with asyncio.timeout(5):
            while max((await _held_tokens(other, 1)).values()) < 460:
                await asyncio.sleep(0.02)
        held = await _held_tokens(other, 2)
        assert sorted(held) == ["decode-0", "decode-1"]
        busy = max(held, key=held.__getitem__)
        assert not running.done()
        outcome = await other.generate(prompt_of(50, 3), 1)
        assert outcome.last.timing.decode_worker_id != busy
        assert (await running).last.timing.decode_worker_id == busy


async def test_killing_a_router_ends_its_own_streams_only(tmp_path: Path) -> None:
    async with _with_two_routers(tmp_path) as (it, other):
        lost = await asyncio.gather(*(_begun(it, seed) for seed in range(STREAMS)))
        kept = await asyncio.gather(*(_begun(other, 100 + seed) for seed in range(STREAMS)))
        assert not any(task.done() for task in (*lost, *kept))
        it.kill("router")
        for task in lost:
            with pytest.raises(HeadraceError):
                await task
        assert len(await asyncio.gather(*kept)) == STREAMS
        # The prefill worker and both decode workers continue with the remaining router.
        for seed in range(4):
            prompt = prompt_of(70, 200 + seed)
            outcome = await other.generate(prompt, 3)
            assert outcome.token_ids == it.expected(prompt, 3)
            assert outcome.last.timing.prefill_worker_id == "prefill-0"
        for name in ("decode-0", "decode-1", "prefill-0"):
            await it.wait_empty(name)
