"""Drain and stop requests to one server, in both orders."""

from __future__ import annotations

import asyncio

from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.rpc.server import GrpcServer
from tests.waiting import PATIENCE_S, let_a_wrong_step_show, until


class Draining:
    """A server with a service that drains until `done`."""

    def __init__(self) -> None:
        self.server = GrpcServer(ServiceConfig(drain_grace_s=600.0, insecure=True), ())
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
    deadline = it.server.request_drain(300.0)
    assert 200 < deadline.remaining_s() <= 300
    # As when a container stops: first the hook that drains, then the signal.
    it.server.request_stop()
    await until(lambda: it.deadlines == [deadline])
    await let_a_wrong_step_show()
    assert not serving.done()
    it.server.request_stop()
    await asyncio.wait_for(serving, PATIENCE_S)
