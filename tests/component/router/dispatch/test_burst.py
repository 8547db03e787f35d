"""Prompts that arrive together, before any of them has its reservation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from headrace.decode.v1 import decode_pb2
from headrace.prefill.v1 import prefill_pb2
from tests.component.router.fakes import (
    FakeDecode,
    FakePrefill,
    Rig,
    hand_over,
    reply,
    text_of,
)
from tests.component.router.fakes.handoff import LAYOUT
from tests.waiting import until

_RESERVE_S = 0.3
_PREFILL_S = 0.1
_BOUND = 5.5
"""The limit on queue wait, in prompts."""
_PROMPTS = 20


async def _reserves_slowly(
    worker: FakeDecode, request: decode_pb2.GenerateRequest
) -> AsyncIterator[Any]:
    await asyncio.sleep(_RESERVE_S)
    async for event in reply("ok")(worker, request):
        yield event


class OneAtATime:
    """Computes a prompt at a time, while `may_run` is set."""

    def __init__(self) -> None:
        self.may_run = asyncio.Event()
        self.may_run.set()

    async def __call__(self, worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        await worker.started(task.transfer_id)
        await self.may_run.wait()
        await asyncio.sleep(_PREFILL_S)
        await hand_over(worker, task)


async def _add_workers(rig: Rig) -> tuple[FakeDecode, FakePrefill, OneAtATime]:
    """Adds a slow decode and a slow prefill worker, and lets the queue measure how long one prompt takes.

    The limit on queue wait is that of some prompts, however slow the machine is.
    """
    computing = OneAtATime()
    decode = await rig.add_decode(_reserves_slowly)
    decode.change_member(max_num_seqs=2 * _PROMPTS)
    rig.refresh()
    prefill = await rig.add_prefill(computing, credit=1)
    assert text_of(await rig.ask("x" * 100)) == "ok"
    assert len(prefill.tasks) == 1
    queue = rig.router.queue
    await until(lambda: queue.estimate().wait_s == 0.0)
    with queue.expect_task(LAYOUT, 100):
        one_s = queue.estimate().wait_s
    assert one_s >= _PREFILL_S
    rig.policy.policy.max_queue_wait.FromMilliseconds(round(1e3 * _BOUND * one_s))
    return decode, prefill, computing


async def test_a_burst_during_one_reservation_keeps_the_limit_on_queue_wait(rig: Rig) -> None:
    decode, prefill, computing = await _add_workers(rig)
    computing.may_run.clear()
    asking = asyncio.gather(*(rig.ask("x" * 100) for _ in range(_PROMPTS)))
    await until(lambda: len(decode.requests) == _PROMPTS + 1)
    computing.may_run.set()
    responses = await asking
    assert all(text_of(response) == "ok" for response in responses)
    # One prompt runs, and those follow that start within the limit.
    assert 4 <= len(prefill.tasks) - 1 <= 7
    assert len(decode.requests) == _PROMPTS + 1
