"""Deadlines of a tenant over HTTP, beside the prompts of another."""

from __future__ import annotations

import asyncio

from tests.kit.router import Rig, with_settings
from tests.kit.workers import hand_over, reply
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
