"""The policy and the queue length decide which prompts are prefilled remotely."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace.inference.v1 import inference_pb2
from headrace_cli.commands.policy import set_policy
from tests.suite.deployment import Outcome, Suite, greedy, prompt_of, suite

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
BOUND_TOKENS = 64
LONG_TOKENS = 120
QUEUED = 14
SETTINGS = (
    # One prompt at a time, 0.24 s each.
    ("prefill", "max_num_seqs", "1"),
    ("prefill", "model", "sim:prefill_s_per_token=0.002"),
    ("decode", "max_num_seqs", "128"),
)
numbers = itertools.count()


def fresh(length: int) -> list[int]:
    return prompt_of(length, next(numbers))


async def goes_remote(it: Suite, length: int) -> bool:
    """Whether an uncached prompt would go to a prefill worker now."""
    return (await it.client.explain(greedy(fresh(length), 1))).remote_prefill


async def until(condition: Callable[[], Awaitable[bool]]) -> int:
    """Waits until the condition holds. Returns how often it did not."""
    looks = 0
    async with asyncio.timeout(20):
        while not await condition():
            looks += 1
            await asyncio.sleep(0.005)
    return looks


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
    async with suite(tmp_path, settings=SETTINGS) as it:
        replica = await it.add("router-1", "router")
        async with it.through(replica) as other:
            await other.wait_joined(1, 1)
            for router in (it, other):
                assert was_remote(await answered(router, BOUND_TOKENS // 2))
            await _short_prompts_stay(it, other)
            await _a_full_queue_is_avoided_until_it_drains(it)
        await it.wait_empty("decode-0")


async def _short_prompts_stay(it: Suite, other: Suite) -> None:
    start_s = time.monotonic()
    await change(it, f"local_prefill_max_tokens={BOUND_TOKENS}")

    def stays(router: Suite) -> Callable[[], Awaitable[bool]]:
        async def local() -> bool:
            return not await goes_remote(router, BOUND_TOKENS // 2)

        return local

    looks = await asyncio.gather(*(until(stays(router)) for router in (it, other)))
    took_s = time.monotonic() - start_s
    # A busy machine may take longer, but then it also polls less often.
    assert took_s < 1.0 or max(looks) < 20, (took_s, looks)
    burst = [
        answered(router, 4 + number) for number in range(BOUND_TOKENS - 8) for router in (it, other)
    ]
    assert not any(map(was_remote, await asyncio.gather(*burst)))
    for router in (it, other):
        assert was_remote(await answered(router, LONG_TOKENS))


async def _a_full_queue_is_avoided_until_it_drains(it: Suite) -> None:
    await change(it, "max_queue_wait=0.6")
    filling = [
        asyncio.create_task(answered(it, LONG_TOKENS, placement=REMOTE)) for _ in range(QUEUED)
    ]

    async def full() -> bool:
        return not await goes_remote(it, LONG_TOKENS)

    async def drained() -> bool:
        return await goes_remote(it, LONG_TOKENS)

    await until(full)
    why = (await it.client.explain(greedy(fresh(LONG_TOKENS), 1))).explanation
    assert "the prefill queue takes" in why
    during = await asyncio.gather(*(answered(it, LONG_TOKENS) for _ in range(5)))
    assert not any(map(was_remote, during))
    assert not all(task.done() for task in filling)
    # An explicit remote placement is honoured, whatever the queue.
    assert all(map(was_remote, await asyncio.gather(*filling)))
    await until(drained)
    assert was_remote(await answered(it, LONG_TOKENS))
    assert not was_remote(await answered(it, BOUND_TOKENS // 2))
