"""The tasks of a killed prefill worker are computed by another worker without delay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.suite.deployment import Suite, advance_until_done, prompt_of, stepped_suite

_TASKS = 10
SETTINGS = (
    ("prefill", "max_num_seqs", str(_TASKS)),
    ("prefill", "model", "sim:prefill_s_per_token=1"),
    ("decode", "max_num_seqs", "64"),
    ("decode", "log_level", "debug"),
)


async def _wait_open(it: Suite, count: int) -> None:
    """Waits until the decode worker has opened that many transfers. A worker reports a task as started before."""
    log_file = it.child("decode-0").spec.log_file
    async with asyncio.timeout(20):
        while log_file.read_text().count(": reserved -> open") < count:
            await asyncio.sleep(0.02)


@pytest.mark.core
async def test_all_ten_tasks_of_a_killed_prefill_worker_finish_elsewhere(tmp_path: Path) -> None:
    async with stepped_suite(tmp_path, SETTINGS, prefill_count=2) as (it, clock):
        # More prompts than both workers hold, so that each is full while some wait.
        prompts = [prompt_of(150, number) for number in range(3 * _TASKS)]
        running = [asyncio.create_task(it.generate(prompt, 6, timeout_s=50)) for prompt in prompts]
        # No task ends before the clock advances.
        await _wait_open(it, 2 * _TASKS)
        assert (await it.status("prefill-0")).running_requests == _TASKS
        it.kill("prefill-0")
        outcomes = await advance_until_done(clock, *running, step_s=150)
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.token_ids == it.expected(prompt, 6)
        timings = [outcome.last.timing for outcome in outcomes]
        assert {timing.attempts for timing in timings} == {1, 2}
        again = [timing for timing in timings if timing.attempts == 2]
        assert len(again) == _TASKS
        # The other prefill worker computed every prompt, not the decode worker as a last resort.
        assert {timing.prefill_worker_id for timing in timings} == {"prefill-1"}
        await it.wait_empty("prefill-1")
        # Blocks that the killed worker might still write to stay in quarantine.
        decode = await it.status("decode-0")
        assert (decode.reserved_blocks, decode.active_transfers) == (0, 0)
