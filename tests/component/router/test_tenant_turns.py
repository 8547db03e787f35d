"""Prompts of several tenants over gRPC, HTTP and from decode workers: their order, and deadlines over HTTP."""

from __future__ import annotations

import asyncio

from tests.component.router.dispatch.test_own_prompts import enqueue, request_of
from tests.kit.router import Rig, with_settings
from tests.kit.workers import hand_over, hang, reply
from tests.waiting import until

pytestmark = with_settings(tenants={"batch": "batch", "chat": "chat"})
_DUE_S = 30.0
# One slot of the decode worker is left.
_LOOPS = 7


async def _until_queued(rig: Rig, count: int) -> None:
    await until(lambda: rig.router.queue.depth == count)


async def test_deadlines_of_a_tenant_do_not_delay_another_over_http(rig: Rig) -> None:
    await rig.add_decode(reply("ok"))
    worker = await rig.add_prefill(hand_over, credit=0)
    names = [f"batch-{number}" for number in range(_LOOPS)]
    asking = [
        asyncio.create_task(rig.text(request_id=name, timeout_s=_DUE_S, key="batch"))
        for name in names
    ]
    await _until_queued(rig, _LOOPS)
    late = asyncio.create_task(rig.post({"prompt": "a prompt", "request_id": "late"}, "chat"))
    await _until_queued(rig, _LOOPS + 1)
    await worker.give_credit(2)
    status, _, body = await late
    assert (status, body["choices"][0]["text"]) == (200, "ok")
    assert await asyncio.gather(*asking) == ["ok"] * _LOOPS
    assert "late" in [task.request_id for task in worker.tasks][:2]


async def test_a_prompt_of_a_decode_worker_counts_for_the_tenant_of_its_request(rig: Rig) -> None:
    decode = await rig.add_decode(hang)
    worker = await rig.add_prefill(hand_over, credit=0)
    queued = []
    for number, tenant in enumerate(("batch", "batch", "batch", "chat")):
        request = request_of(
            decode, transfer_id=f"own-{number}", request_id=f"{tenant}-{number}", tenant=tenant
        )
        queued.append(asyncio.create_task(enqueue(rig, request)))
        await _until_queued(rig, number + 1)
    await worker.give_credit(2)
    await asyncio.gather(*queued)
    assert [task.request_id for task in worker.tasks][:2] == ["batch-0", "chat-3"]
