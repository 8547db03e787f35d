"""Prompts that arrive together, while none of them has its reservation yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2
from headrace.prefill.v1 import prefill_pb2
from tests.component.router.fakes import (
    FakeDecode,
    FakePrefill,
    Rig,
    eventually,
    hand_over,
    say,
    text_of,
)

_RESERVE_S = 0.3
_PREFILL_S = 0.1
_BOUND_S = 0.55
_PROMPTS = 20


async def _reserves_slowly(
    worker: FakeDecode, request: decode_pb2.GenerateRequest
) -> AsyncIterator[Any]:
    await asyncio.sleep(_RESERVE_S)
    async for event in say("ok")(worker, request):
        yield event


async def _one_at_a_time(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
    await worker.started(task.transfer_id)
    await asyncio.sleep(_PREFILL_S)
    await hand_over(worker, task)


async def test_a_burst_within_one_reservation_does_not_overshoot_the_bound_on_waiting(
    rig: Rig,
) -> None:
    decode = await rig.add_decode(_reserves_slowly)
    decode.member.max_num_seqs = 2 * _PROMPTS
    rig.refresh()
    prefill = await rig.add_prefill(_one_at_a_time, credit=1)
    rig.policy.policy.max_queue_wait.FromMilliseconds(round(1e3 * _BOUND_S))
    # From this one the router learns how long a prompt takes.
    assert text_of(await rig.ask("x" * 100)) == "ok"
    assert len(prefill.tasks) == 1
    group = rig.router.queue
    await eventually(lambda: group.estimate().wait_s == 0.0)
    answers = await asyncio.gather(*(rig.ask("x" * 100) for _ in range(_PROMPTS)))
    assert all(text_of(answer) == "ok" for answer in answers)
    # One at once, and as many after it as get their turn within the bound.
    assert 4 <= len(prefill.tasks) - 1 <= 7
    assert len(decode.requests) == _PROMPTS + 1


async def test_a_ticket_counts_in_the_queue_until_its_prompt_comes() -> None:
    looking_aside = await Rig(look_aside=True).start()
    try:
        decode = await looking_aside.add_decode(say("ok"))
        decode.member.max_num_seqs = 2 * _PROMPTS
        looking_aside.refresh()
        prefill = await looking_aside.add_prefill(_one_at_a_time, credit=1)
        looking_aside.policy.policy.max_queue_wait.FromMilliseconds(round(1e3 * _BOUND_S))
        assert text_of(await looking_aside.ask("x" * 100)) == "ok"
        await eventually(lambda: looking_aside.router.queue.estimate().wait_s == 0.0)
        request = inference_pb2.RouteRequest(request=inference_pb2.GenerateRequest(text="x" * 100))
        routed = [await looking_aside.stub.Route(request, timeout=5) for _ in range(_PROMPTS)]
        remote = [route.direct for route in routed if route.remote_prefill]
        assert 4 <= len(remote) <= 7
        await looking_aside.stub.Prefill(inference_pb2.PrefillRequest(direct=remote[0]), timeout=5)
        assert len(prefill.tasks) == 2
        # Those whose clients never come are forgotten.
        await eventually(lambda: looking_aside.router.queue.estimate().wait_s == 0.0)
    finally:
        await looking_aside.close()
