"""Drain and stop requests to one server, in both orders."""

from __future__ import annotations

import asyncio

from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.rpc.server import GrpcServer


class Draining:
    """A server with a service that drains until `done`."""

    def __init__(self) -> None:
        self.server = GrpcServer(ServiceConfig(drain_grace_s=30.0, insecure=True), ())
        self.deadlines: list[Deadline] = []
        self.done = asyncio.Event()

    async def start(self) -> asyncio.Task[None]:
        await self.server.start()
        return asyncio.create_task(self.server.serve_until_stopped(self._on_drain))

    async def _on_drain(self, deadline: Deadline) -> None:
        self.deadlines.append(deadline)
        await self.done.wait()


async def test_a_stop_during_a_drain_waits_for_it_and_a_second_stop_does_not() -> None:
    it = Draining()
    serving = await it.start()
    deadline = it.server.request_drain(20.0)
    assert 19 < deadline.remaining_s() <= 20
    # As when a container stops: first the hook that drains, then the signal.
    it.server.request_stop()
    await asyncio.sleep(0.1)
    assert not serving.done()
    assert it.deadlines == [deadline]
    it.server.request_stop()
    await asyncio.wait_for(serving, 5)


async def test_a_drain_request_after_a_stop_changes_no_deadline() -> None:
    it = Draining()
    serving = await it.start()
    it.server.request_stop()
    assert it.server.request_drain(1.0) == it.server.request_drain(2.0)
    assert it.server.request_drain().remaining_s() > 29
    await asyncio.sleep(0.1)
    assert not serving.done()
    it.done.set()
    await asyncio.wait_for(serving, 5)
    assert len(it.deadlines) == 1
