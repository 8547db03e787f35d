"""Three times the capacity: admitted requests are answered correctly, the others are refused with a retry delay.

All times of the load are simulated, so that load and capacity keep their ratio on every machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from headrace.worker.v1 import worker_pb2
from headrace_common.errors import DecodeFull, QueueFull
from tests.sim_clock import ClockController
from tests.suite.deployment import Suite, advance_until_done, prompt_of, stepped_suite
from tests.waiting import until

# A client gives up after this simulated time. A request that was admitted has long to be answered.
PATIENCE_S = 4.0
ANSWERED_S = 120.0
LOAD_S = 6.0
SLOTS = 4
WORKERS = 2
BLOCKS = 40
ANSWER_TOKENS = 12
# In simulated time, a request holds a slot for about 0.7 s, so that both workers together finish about 12 requests
# per second.
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.0005"),
    ("decode", "model", "sim:decode_step_s=0.05,prefill_s_per_token=0.0005"),
    ("decode", "max_num_seqs", str(SLOTS)),
    ("decode", "num_gpu_blocks_override", str(BLOCKS)),
    ("router", "admission_wait_s", "2"),
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


async def ask(it: Suite, number: int, clock: ClockController, ends: Counter[str]) -> None:
    """One client that retries after the delay that it receives."""
    prompt = prompt_of(80, number)
    end_s = clock.now_s + PATIENCE_S
    while clock.now_s < end_s:
        try:
            outcome = await it.generate(prompt, ANSWER_TOKENS, timeout_s=ANSWERED_S)
        except (DecodeFull, QueueFull) as error:
            hint_s = error.retry_after_s or 0.0
            ends["refusals" if hint_s > 0 else "refusals without a hint"] += 1
            again_s = min(end_s, clock.now_s + hint_s)
            await until(lambda again_s=again_s: clock.now_s >= again_s, ANSWERED_S)  # type: ignore[misc]
        else:
            assert outcome.token_ids == it.expected(prompt, ANSWER_TOKENS)
            ends["right"] += 1
            return
    ends["gave up"] += 1


async def test_overload_is_refused_with_delays_and_admitted_requests_are_answered(
    tmp_path: Path,
) -> None:
    async with stepped_suite(tmp_path, SETTINGS, prefill_count=WORKERS, decode_count=WORKERS) as (
        it,
        clock,
    ):
        ends: Counter[str] = Counter()
        async with watched(it) as seen:
            clients: list[asyncio.Task[None]] = []
            while clock.now_s < LOAD_S:
                clients.append(asyncio.create_task(ask(it, len(clients), clock, ends)))
                # The services work in real time, which must not be shorter than simulated time.
                await asyncio.sleep(1 / OFFERED_PER_S)
                await clock.advance(1 / OFFERED_PER_S)
            await advance_until_done(clock, *clients, timeout_s=ANSWERED_S)
        assert ends["refusals"] > ends["right"]
        assert set(ends) <= {"right", "refusals", "gave up"}, ends
        # A third of the load fits. Half of that is far from a collapse.
        assert ends["right"] > len(clients) / 6, ends
        for status in seen:
            # Growth is reserved with the prompt, so that no running request has to release blocks later.
            assert status.running_requests <= SLOTS
            # An admitted request may wait for the step in which its predecessor ends.
            assert status.waiting_requests <= SLOTS
            assert status.reserved_blocks + status.quarantined_blocks < BLOCKS
        # A step in which requests were cancelled ends when the clock advances.
        await advance_until_done(
            clock,
            *(
                it.wait_empty(f"{role}-{number}")
                for role in ("decode", "prefill")
                for number in range(WORKERS)
            ),
        )
        prompt = prompt_of(80, 9_999)
        (answer,) = await advance_until_done(clock, it.generate(prompt, 4))
        assert answer.token_ids == it.expected(prompt, 4)
