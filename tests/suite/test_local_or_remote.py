"""The policy and the queue length decide which prompts are prefilled remotely."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace.inference.v1 import inference_pb2
from headrace_cli.commands.policy import set_policy
from tests.sim_clock import ClockController
from tests.suite.deployment import (
    Outcome,
    Suite,
    advance_until_done,
    greedy,
    prompt_of,
    stepped_suite,
)
from tests.waiting import until

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
BOUND_TOKENS = 64
LONG_TOKENS = 120
QUEUED = 14
# The clock advances in small steps, which take far longer than real time on a slow machine.
QUEUED_TIMEOUT_S = 100.0
# A policy change reaches every router within a second. A machine that is ten times slower meets this.
CHANGE_S = 10.0
SETTINGS = (
    # One prompt at a time, 0.24 s each at least.
    ("prefill", "max_num_seqs", "1"),
    ("prefill", "model", "sim:prefill_s_per_token=0.002"),
    ("decode", "max_num_seqs", "128"),
)
numbers = itertools.count()


def fresh(length: int) -> list[int]:
    return prompt_of(length, next(numbers))


async def goes_remote(it: Suite, length: int) -> bool:
    """Whether an uncached prompt would go to a prefill worker now."""
    return (await it.operator.explain(greedy(fresh(length), 1))).remote_prefill


async def answered(it: Suite, length: int, **options: object) -> Outcome:
    prompt = fresh(length)
    outcome = await it.generate(prompt, 4, **options)  # type: ignore[arg-type]
    assert outcome.token_ids == it.expected(prompt, 4)
    return outcome


def was_remote(outcome: Outcome) -> bool:
    return bool(outcome.last.timing.prefill_worker_id)


async def change(it: Suite, *changes: str) -> None:
    await set_policy(it.deployment.registry, changes)


async def test_short_and_queue_delayed_prompts_are_prefilled_on_decode(
    tmp_path: Path,
) -> None:
    async with stepped_suite(tmp_path, SETTINGS) as (it, clock):
        replica = await it.add("router-1", "router")
        async with it.through(replica) as other:
            await other.wait_joined(1, 1)
            prefilled = await advance_until_done(
                clock, *(answered(router, BOUND_TOKENS // 2) for router in (it, other))
            )
            assert all(map(was_remote, prefilled))
            await _short_prompts_stay(it, other, clock)
            await _a_full_queue_is_avoided_until_it_drains(it, clock)
        await it.wait_empty("decode-0")


async def _short_prompts_stay(it: Suite, other: Suite, clock: ClockController) -> None:
    def stays(router: Suite) -> Callable[[], Awaitable[bool]]:
        async def local() -> bool:
            return not await goes_remote(router, BOUND_TOKENS // 2)

        return local

    await change(it, f"local_prefill_max_tokens={BOUND_TOKENS}")
    await asyncio.gather(*(until(stays(router), CHANGE_S) for router in (it, other)))
    # The clock stands still, so that no prefill worker can answer.
    burst = [
        answered(router, 4 + number) for number in range(BOUND_TOKENS - 8) for router in (it, other)
    ]
    assert not any(map(was_remote, await asyncio.gather(*burst)))
    long = await advance_until_done(
        clock, *(answered(router, LONG_TOKENS) for router in (it, other))
    )
    assert all(map(was_remote, long))


async def _a_full_queue_is_avoided_until_it_drains(it: Suite, clock: ClockController) -> None:
    await change(it, "max_queue_wait=0.6")
    filling = [
        asyncio.create_task(answered(it, LONG_TOKENS, placement=REMOTE, timeout_s=QUEUED_TIMEOUT_S))
        for _ in range(QUEUED)
    ]

    async def full() -> bool:
        return not await goes_remote(it, LONG_TOKENS)

    async def drained() -> bool:
        return await goes_remote(it, LONG_TOKENS)

    # The queue keeps these prompts until the clock advances.
    await until(full, 20.0)
    why = (await it.operator.explain(greedy(fresh(LONG_TOKENS), 1))).explanation
    assert "the prefill queue takes" in why
    during = await asyncio.gather(*(answered(it, LONG_TOKENS) for _ in range(5)))
    assert not any(map(was_remote, during))
    assert not any(task.done() for task in filling)
    # An explicit remote placement is honoured, whatever the queue.
    assert all(
        map(was_remote, await advance_until_done(clock, *filling, timeout_s=QUEUED_TIMEOUT_S))
    )
    await until(drained, 20.0)
    (after,) = await advance_until_done(clock, answered(it, LONG_TOKENS))
    assert was_remote(after)
    assert not was_remote(await answered(it, BOUND_TOKENS // 2))
