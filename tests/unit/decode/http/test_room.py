"""The blocks for a decode worker's own requests: fair shares with bounded waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, QueueFull
from headrace_decode.admission import Capacity
from headrace_decode.http.dispatcher import BlockShares
from tests.waiting import until

# Created at import, so it must outlast the whole run.
LATER = Deadline.after(24 * 3600)
PROMPT, ANSWER = 20, 12
BLOCKS_EACH = 2


def shares(blocks: int, *, wait_s: float = 30.0) -> BlockShares:
    """A worker with blocks of 16 tokens."""
    return BlockShares(Mock(), Capacity(blocks, 16, 256, 100), dict, wait_s)


@asynccontextmanager
async def held(
    own: BlockShares, tenant: str, deadline: Deadline = LATER, prompt_tokens: int = PROMPT
) -> AsyncIterator[None]:
    request: Any = SimpleNamespace(
        token_ids=(7,) * prompt_tokens,
        sampling=SimpleNamespace(max_tokens=ANSWER),
        tenant=tenant,
        priority=Priority.NORMAL,
    )
    with closing(await own.acquire(request, deadline)):
        yield


async def test_a_late_tenant_is_next_before_all_that_wait() -> None:
    own = shares(2 * BLOCKS_EACH)
    started: list[str] = []
    end = asyncio.Event()

    async def run(tenant: str) -> None:
        async with held(own, tenant):
            started.append(tenant)
            await end.wait()
            end.clear()

    tasks = [asyncio.create_task(run("greedy")) for _ in range(8)]
    await until(lambda: own.pool.waiting == 6)
    tasks.append(asyncio.create_task(run("late")))
    await until(lambda: own.pool.waiting == 7)
    end.set()
    await until(lambda: len(started) >= 3)
    assert started[:3] == ["greedy", "greedy", "late"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (own.pool.used, own.pool.waiting) == (0, 0)


async def test_the_wait_ends_at_the_deadline_or_after_the_setting() -> None:
    own = shares(BLOCKS_EACH, wait_s=0.05)
    async with held(own, "first"):
        with pytest.raises(DeadlineExceeded, match="room for"):
            async with held(own, "second", Deadline.after(0.02)):
                pass
        # A tenant's second request is beyond its share of one unit.
        with pytest.raises(QueueFull) as refused:
            async with held(own, "first"):
                pass
        assert refused.value.retry_after_s
        assert (own.pool.used, own.pool.waiting) == (BLOCKS_EACH, 0)
    assert (own.pool.used, own.pool.waiting) == (0, 0)


async def test_a_prompt_beyond_the_worker_passes_to_the_engine_which_rejects_it() -> None:
    own = shares(1)
    async with held(own, "a", prompt_tokens=200):
        assert own.pool.used == 1
