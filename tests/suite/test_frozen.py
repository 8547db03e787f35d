"""Frozen workers keep their connections but send nothing. Requests continue on other workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.suite.deployment import Suite, prompt_of, suite

# The connection to a silent worker ends within 7 s. A new attempt takes little time.
NOTICED_S = 10.0


@contextlib.contextmanager
def frozen(it: Suite, name: str) -> Iterator[None]:
    process_id = it.child(name).process.pid
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


async def test_prompts_of_a_frozen_prefill_worker_are_computed_elsewhere(tmp_path: Path) -> None:
    slow = ("prefill", "model", "sim:prefill_s_per_token=0.002")
    async with suite(tmp_path, prefill_count=2, settings=(slow,)) as it:
        prompts = [prompt_of(150, number) for number in range(8)]
        running = [asyncio.create_task(it.generate(one, 6, timeout_s=60)) for one in prompts]
        await it.wait_running("prefill-0")
        started_s = time.monotonic()
        with frozen(it, "prefill-0"):
            outcomes = await asyncio.gather(*running)
        assert time.monotonic() - started_s < NOTICED_S
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.token_ids == it.expected(prompt, 6)
        assert max(outcome.last.timing.attempts for outcome in outcomes) > 1
