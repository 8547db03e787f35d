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
from headrace_engine.sim.clock_control import ClockController
from tests.suite.deployment import Suite, advance_until_done, prompt_of, stepped_suite
from tests.suite.loop_lag import LoopLag, measured_loop_lag

# In simulated time at the pace that it has when the client starts, and at least this long in real time.
DEADLINE_S = 4.0
LOAD_S = 6.0
SLOTS = 4
WORKERS = 2
BLOCKS = 40
ANSWER_TOKENS = 12
# A client learns the end of its request this long after the deadline at the latest.
LATE_S = 1.0
# In simulated time, a request holds a slot for about 0.7 s, so that both workers together finish about 12 requests
# per second.
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


def pace(clock: ClockController, started_s: float) -> float:
    """Real seconds in each simulated second so far, at least 1.

    On a busy machine simulated time is slow, and deadlines in real time would end most requests that were admitted.
    """
    return max(1.0, (time.monotonic() - started_s) / clock.now_s) if clock.now_s else 1.0


async def ask(it: Suite, number: int, timeout_s: float, ends: Counter[str], lag: LoopLag) -> None:
    """One client that retries after the delay that it receives."""
    prompt = prompt_of(80, number)
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0.1:
        try:
            outcome = await it.generate(prompt, ANSWER_TOKENS, timeout_s=left_s)
        except (DeadlineExceeded, TransferTimeout):
            break
        except (DecodeFull, QueueFull) as error:
            hint_s = error.retry_after_s or 0.0
            ends["refusals" if 0 < hint_s <= 60 else "refusals without a hint"] += 1
            await asyncio.sleep(min(max(0.0, deadline_s - time.monotonic()), hint_s))
        else:
            assert outcome.token_ids == it.expected(prompt, ANSWER_TOKENS)
            ends["right"] += 1
            return
    late_s, lag_s = time.monotonic() - deadline_s, lag.since(deadline_s)
    assert late_s < LATE_S + lag_s, (late_s, lag_s)
    ends["out of time"] += 1


async def test_overload_is_refused_with_delays_and_admitted_requests_are_answered(
    tmp_path: Path,
) -> None:
    async with stepped_suite(tmp_path, SETTINGS, prefill_count=WORKERS, decode_count=WORKERS) as (
        it,
        clock,
    ):
        ends: Counter[str] = Counter()
        async with watched(it) as seen, measured_loop_lag() as lag:
            clients: list[asyncio.Task[None]] = []
            started_s = time.monotonic()
            while clock.now_s < LOAD_S:
                timeout_s = DEADLINE_S * pace(clock, started_s)
                clients.append(asyncio.create_task(ask(it, len(clients), timeout_s, ends, lag)))
                # Simulated time is as late as the clients, so that load and capacity keep their ratio.
                await asyncio.sleep(1 / OFFERED_PER_S)
                await clock.advance(1 / OFFERED_PER_S)
            await advance_until_done(clock, *clients)
        assert ends["refusals"] > ends["right"]
        assert set(ends) <= {"right", "refusals", "out of time"}, ends
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
