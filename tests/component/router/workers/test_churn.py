"""Workers join and leave under load, and no request hangs or fails."""

from __future__ import annotations

import asyncio
import time
from random import Random

from headrace.prefill.v1 import prefill_pb2
from tests.component.router.fakes import FakeDecode, FakePrefill, Rig, hand_over, reply, text_of

_DURATION_S = 1.5
_OVERTIME_S = 30.0
_CHANGE_EVERY_S = 0.05


async def _slowly(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
    await asyncio.sleep(0.01)
    await worker.started(task.transfer_id)
    await asyncio.sleep(0.01)
    await hand_over(worker, task)


async def test_one_retry_is_enough_while_workers_join_and_leave(rig: Rig) -> None:
    rig.policy.policy.retry_budget = 1
    random = Random(7)
    for _ in range(2):
        await rig.add_decode(reply("ok"))
        await rig.add_prefill(_slowly)
    stop = asyncio.Event()
    attempts: list[int] = []
    slowest_s = 0.0

    async def load() -> None:
        nonlocal slowest_s
        while not stop.is_set():
            started_s = time.monotonic()
            responses = await rig.ask("a prompt", timeout_s=30.0)
            assert text_of(responses) == "ok"
            attempts.append(responses[-1].timing.attempts)
            slowest_s = max(slowest_s, time.monotonic() - started_s)

    loads = [asyncio.create_task(load()) for _ in range(8)]
    end_s = time.monotonic() + _DURATION_S
    limit_s = end_s + _OVERTIME_S
    pulling, drained = list(rig.prefills), list[FakeDecode]()
    changes = 0

    def goes_on() -> bool:
        # On a slow machine the load takes longer to mean something.
        enough = changes >= 10 and len(attempts) > 50
        return time.monotonic() < (end_s if enough else limit_s)

    while goes_on() and not any(task.done() for task in loads):
        changes += 1
        pulling.append(await rig.add_prefill(_slowly))
        lost = pulling.pop(random.randrange(len(pulling) - 1))
        # As if killed, with all of its tasks, started or not.
        await lost.die()
        if changes % 4 == 0:
            await rig.add_decode(reply("ok"))
            # It gets no new requests, and its present ones end.
            drained.append(rig.decodes.pop(0))
            rig.refresh()
        await asyncio.sleep(_CHANGE_EVERY_S)
    stop.set()
    await asyncio.gather(*loads)
    await asyncio.gather(*(worker.kill() for worker in drained))
    assert changes >= 10
    assert len(attempts) > 50
    assert set(attempts) <= {1, 2}
    # Half of the deadline: a request that waits for a lost worker would take all of it.
    assert slowest_s < 15.0
    assert rig.router.queue.depth == 0
