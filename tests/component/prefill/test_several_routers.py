"""A prefill worker between two routers with real queues: busy routers share its slots."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import grpc.aio
import pytest

from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.priority import Priority
from headrace_common.config import ServiceConfig
from headrace_kv.layout import KvLayout, layout_to_proto
from headrace_prefill.pull import TaskPuller
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.service import QueueService
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from tests.component.prefill.test_puller import ScriptedWorker
from tests.waiting import until

_LAYOUT = KvLayout.attention(
    model="m", dtype="float32", layer_count=1, kv_head_count=1, block_tokens=16, parts={"kv": 4}
)
_SLOTS = 4


class QueueOfRouter:
    """The prefill queue of one router on a port."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue = PrefillQueue(1_000, sign=lambda task, ref, layout_hash: b"")
        self.tasks: list[QueuedTask] = []

    async def start(self) -> None:
        self.server = grpc.aio.server()
        service = QueueService(self.queue, cast("Any", None), lambda: None)
        prefill_pb2_grpc.add_PrefillQueueServiceServicer_to_server(service, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.member = registry_pb2.Member(
            worker_id=self.name, incarnation="a" * 16, endpoint=f"127.0.0.1:{port}"
        )

    def add(self, count: int, priority: Priority = Priority.NORMAL) -> None:
        for _ in range(count):
            name = f"{self.name}-{len(self.tasks)}"
            task = prefill_pb2.PrefillTask(transfer_id=name, token_ids=[1, 2])
            terms = TaskTerms(deadline_s=1e6, priority=priority)
            self.tasks.append(self.queue.enqueue(task, layout=_LAYOUT, terms=terms))

    @property
    def ended(self) -> int:
        """Tasks that ended well."""
        return sum(task.outcome.done() and task.outcome.result() is None for task in self.tasks)


class Site:
    """Two routers and a worker with four slots. The test ends the tasks."""

    def __init__(self) -> None:
        self.routers = [QueueOfRouter("r0"), QueueOfRouter("r1")]
        self.worker = ScriptedWorker()
        self.puller = TaskPuller(
            ServiceConfig(),
            self.worker,  # type: ignore[arg-type]
            model="m",
            layout=layout_to_proto(_LAYOUT),
        )

    def running(self, name: str) -> int:
        """Tasks of a router that the worker has started."""
        return sum(one.startswith(name) for one in self.worker.running)

    def end(self, choose: Callable[[str], bool] = lambda name: True) -> None:
        for name, event in self.worker.running.items():
            if choose(name):
                event.set()

    async def end_all(self, router: QueueOfRouter) -> None:
        """Ends tasks until none of a router is left."""

        def ended() -> bool:
            self.end()
            return router.ended == len(router.tasks)

        await until(ended, 60.0)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    async with AsyncExitStack() as stack:
        for router in site.routers:
            await router.start()
            stack.push_async_callback(router.server.stop, None)
        stack.push_async_callback(site.puller.close)
        site.puller.set_routers([router.member for router in site.routers])
        for router in site.routers:
            await until(lambda: bool(router.queue.workers.loads()))  # noqa: B023
        yield site


async def test_an_overloaded_router_gets_the_slots_that_an_idle_one_leaves(site: Site) -> None:
    full, idle = site.routers
    full.add(12)
    await until(lambda: site.running("r0") == _SLOTS, 60.0)
    # The idle router keeps its credit: its task comes at once, and gets the next free slot.
    idle.add(1)
    await until(lambda: idle.tasks[0].worker is not None, 60.0)
    site.end()
    await until(lambda: site.running("r1") == 1, 60.0)
    await site.end_all(full)
    await site.end_all(idle)


async def test_full_routers_share_the_slots_equally(site: Site) -> None:
    more, fewer = site.routers
    more.add(90)
    fewer.add(30)
    while fewer.ended < 20:
        # A router may have tasks beyond the slots, for the credit that it had before.
        await until(lambda: len(site.worker.running) >= _SLOTS, 60.0)
        done = more.ended + fewer.ended
        site.end()
        await until(lambda: more.ended + fewer.ended >= done + _SLOTS, 60.0)  # noqa: B023
    assert 12 <= more.ended <= 32
    await site.end_all(more)
    await site.end_all(fewer)


async def test_the_slots_of_a_router_that_dies_go_to_the_others(site: Site) -> None:
    dying, other = site.routers
    dying.add(12)
    await until(lambda: site.running("r0") == _SLOTS, 60.0)
    other.add(8)
    await dying.server.stop(None)
    site.puller.set_routers([other.member])
    await until(lambda: site.running("r1") == _SLOTS, 60.0)
    assert site.running("r0") == 0
    await site.end_all(other)
