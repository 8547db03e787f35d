"""Three times the capacity: admitted requests are answered correctly, the others are refused with a retry delay."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from headrace.worker.v1 import worker_pb2
from headrace_common.errors import DeadlineExceeded, DecodeFull, QueueFull, TransferTimeout
from tests.suite.deployment import Suite, prompt_of, suite

DEADLINE_S = 4.0
LOAD_S = 6.0
SLOTS = 4
WORKERS = 2
BLOCKS = 40
ANSWER_TOKENS = 12
# A request holds a slot for about 0.7 s, so both workers together finish about 12 requests per second.
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.0005"),
    ("decode", "model", "sim:decode_step_s=0.05,prefill_s_per_token=0.0005"),
    ("decode", "max_num_seqs", str(SLOTS)),
    ("decode", "num_gpu_blocks_override", str(BLOCKS)),
)
OFFERED_PER_S = 36.0


@contextlib.asynccontextmanager
async def watched(it: Suite) -> AsyncIterator[list[worker_pb2.WatchStatusResponse]]:
    """Records the status of the decode workers."""
    seen: list[worker_pb2.WatchStatusResponse] = []

    async def watch(name: str) -> None:
        while True:
            seen.append(await it.status(name))
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(watch(f"decode-{number}")) for number in range(WORKERS)]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask(it: Suite, number: int, ends: Counter[str]) -> None:
    """One client that retries after the delay that it receives."""
    prompt = prompt_of(80, number)
    started_s = time.monotonic()
    while (left_s := started_s + DEADLINE_S - time.monotonic()) > 0.1:
        try:
            outcome = await it.generate(prompt, ANSWER_TOKENS, timeout_s=left_s)
        except (DeadlineExceeded, TransferTimeout):
            break
        except (DecodeFull, QueueFull) as error:
            hint_s = error.retry_after_s or 0.0
            ends["refusals" if 0 < hint_s <= 60 else "refusals without a hint"] += 1
            await asyncio.sleep(min(left_s, hint_s))
        else:
            assert outcome.token_ids == it.expected(prompt, ANSWER_TOKENS)
            ends["right"] += 1
            return
    # All clients share one event loop, which is late on a slow machine. The chaos test has the narrow bound.
    assert time.monotonic() - started_s < DEADLINE_S + 4
    ends["out of time"] += 1


async def test_overload_is_refused_with_delays_and_admitted_requests_are_answered(
    tmp_path: Path,
) -> None:
    async with suite(
        tmp_path, prefill_count=WORKERS, decode_count=WORKERS, settings=SETTINGS
    ) as it:
        ends: Counter[str] = Counter()
        async with watched(it) as seen:
            clients: list[asyncio.Task[None]] = []
            end_s = time.monotonic() + LOAD_S
            while time.monotonic() < end_s:
                clients.append(asyncio.create_task(ask(it, len(clients), ends)))
                await asyncio.sleep(1 / OFFERED_PER_S)
            await asyncio.gather(*clients)
        assert ends["refusals"] > ends["right"]
        assert set(ends) <= {"right", "refusals", "out of time"}, ends
        # A third of the load fits. Half of that is far from a collapse, on any machine.
        assert ends["right"] > len(clients) / 6, ends
        for status in seen:
            # Growth is reserved with the prompt, so that no running request has to release blocks later.
            assert status.running_requests <= SLOTS
            # An admitted request may wait for the step in which its predecessor ends.
            assert status.waiting_requests <= SLOTS
            assert status.reserved_blocks + status.quarantined_blocks < BLOCKS
        for number in range(WORKERS):
            await it.wait_empty(f"decode-{number}")
            await it.wait_empty(f"prefill-{number}")
        prompt = prompt_of(80, 9_999)
        assert (await it.generate(prompt, 4)).token_ids == it.expected(prompt, 4)
