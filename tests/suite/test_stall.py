"""Workers that are stuck, though their connections live. Their requests continue elsewhere, with the right tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace_cli.members import member_rows
from tests.suite.deployment import Suite, prompt_of, suite
from tests.suite.slow_process import Delays
from tests.suite.test_migration import NOTICED_S, asked, check, moved_to
from tests.waiting import until

# Less than users have, for a fast test. The first steps of an engine have longer.
SETTINGS = (
    ("decode", "model", "sim:decode_step_s=0.02"),
    ("prefill", "model", "sim:layer_s=0.02"),
    ("decode", "step_stall_s", "1.5"),
    ("prefill", "step_stall_s", "1.5"),
)


@asynccontextmanager
async def stoppable(folder: Path, role: str) -> AsyncIterator[tuple[Suite, Delays]]:
    delays = Delays(folder / "delays")
    delays.folder.mkdir()
    async with suite(
        folder,
        settings=SETTINGS,
        spawning=lambda spawn: delays.spawning(spawn, role),
        prefill_count=2 if role == "prefill" else 1,
        decode_count=2 if role == "decode" else 1,
    ) as it:
        yield it, delays


async def state_of(it: Suite, name: str) -> str:
    """What `headrace workers` shows."""
    rows = await member_rows(it.deployment.registry)
    (state,) = (row.state for row in rows if row.member.worker_id == name)
    return state


@pytest.mark.core
async def test_streams_leave_a_decode_worker_with_a_step_that_does_not_end(tmp_path: Path) -> None:
    async with stoppable(tmp_path, "decode") as (it, delays):
        requests = asked(8)
        running = await it.begun(requests, NOTICED_S, started_tokens=8)
        victim, survivor = await it.busier("decode-0", "decode-1")
        start_s = time.monotonic()
        delays.set(**{f"step.{victim}": 1.0})
        outcomes = await check(it, requests, running)
        print("moved", time.monotonic() - start_s, "s after the start of the stall")
        assert moved_to(one.last for one in outcomes) == {survivor}
        assert (await state_of(it, victim)).startswith("stalled")
        # It gets nothing.
        outcomes = [await it.ask(request, NOTICED_S) for request in asked(3, 100)]
        assert {one.last.timing.decode_worker_id for one in outcomes} == {survivor}
        # It comes back by itself.
        delays.set()
        for name in (victim, survivor):
            await it.wait_empty(name)

        async def steps_again() -> bool:
            return await state_of(it, victim) == "serving"

        await until(steps_again)
        # New prompts: a repeated one goes to the worker that has it.
        seeds = itertools.count(51)

        async def serves() -> bool:
            outcome = await it.generate(prompt_of(40, next(seeds)), 2)
            return outcome.last.timing.decode_worker_id == victim

        await until(serves)


@pytest.mark.parametrize("fault", ["step", "loop"])
async def test_prompts_leave_a_stuck_prefill_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("HEADRACE_PING_TIMEOUT_S", "3")
    async with stoppable(tmp_path, "prefill") as (it, delays):
        for request in asked(4, 200):
            await it.ask(request, NOTICED_S)
        requests = asked(8)
        start_s = time.monotonic()
        delays.set(**{f"{fault}.prefill-0": 1.0})
        running = [asyncio.create_task(it.ask(one, NOTICED_S)) for one in requests]
        outcomes = await check(it, requests, running)
        print("moved", time.monotonic() - start_s, "s after the start of the stall")
        assert max(one.last.timing.attempts for one in outcomes) == 2
        assert {one.last.timing.prefill_worker_id for one in outcomes} == {"prefill-1"}
        delays.set()

        seeds = itertools.count(300)

        async def serves() -> bool:
            # A cached prompt would need no prefill.
            outcome = await it.generate(prompt_of(40, next(seeds)), 2)
            return outcome.last.timing.prefill_worker_id == "prefill-0"

        await until(serves)
