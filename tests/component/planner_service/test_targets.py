"""The supervisor of `headrace up` carries targets out, acknowledges them, and refuses those of another view."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from rich.console import Console

from headrace.planner.v1 import planner_pb2, planner_pb2_grpc
from headrace_cli.up.keeping import Scaler, TargetFollower
from headrace_common.config import ServiceConfig
from headrace_common.errors import NotFound, WorkerGone
from headrace_common.rpc.server import GrpcServer
from headrace_planner.observation import WorkerCounts
from tests.waiting import until

Counts = planner_pb2.WorkerCounts
LIMIT_S = 20.0


def _counts(prefill: int, decode: int, both: int = 0) -> planner_pb2.WorkerCounts:
    return Counts(prefill=prefill, decode=decode, both=both)


class FakeScaler:
    """Has workers, and fails where `fault` is set."""

    def __init__(self) -> None:
        self.running: tuple[int, int] = (1, 1)
        self.both = 0
        self.fault = ""

    def counts(self) -> WorkerCounts:
        return WorkerCounts(*self.running, self.both)

    async def apply(self, target: WorkerCounts) -> None:
        if self.fault:
            raise WorkerGone(self.fault)
        self.running, self.both = (target.prefill, target.decode), target.both


class FakePlanner(planner_pb2_grpc.PlannerServiceServicer):
    """Sends the targets of a queue, and keeps the acknowledgements."""

    GetStatus = ListDecisions = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.targets: asyncio.Queue[planner_pb2.Target] = asyncio.Queue()
        self.acknowledged: list[tuple[str, str]] = []
        self.forgotten = False

    async def WatchTargets(
        self, request: planner_pb2.WatchTargetsRequest, context: Any
    ) -> AsyncIterator[planner_pb2.WatchTargetsResponse]:
        while True:
            yield planner_pb2.WatchTargetsResponse(target=await self.targets.get())

    async def AcknowledgeTarget(
        self, request: planner_pb2.AcknowledgeTargetRequest, context: Any
    ) -> planner_pb2.AcknowledgeTargetResponse:
        self.acknowledged.append((request.target_id, request.failure))
        if self.forgotten:
            raise NotFound("another start of the planner made it")
        return planner_pb2.AcknowledgeTargetResponse()

    async def send(self, name: str, current: tuple[int, ...], wanted: tuple[int, ...]) -> str:
        """Sends a target. Returns the failure that comes back, empty without one."""
        before = len(self.acknowledged)
        await self.targets.put(
            planner_pb2.Target(
                id=name,
                current=_counts(*current),
                workers=_counts(*wanted),
            )
        )
        await until(lambda: len(self.acknowledged) > before, LIMIT_S, name)
        assert self.acknowledged[-1][0] == name
        return self.acknowledged[-1][1]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakePlanner, FakeScaler]]:
    planner, scaler = FakePlanner(), FakeScaler()
    server = GrpcServer(
        ServiceConfig(internal_listen="127.0.0.1:0"), ["headrace.planner.v1.PlannerService"]
    )
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(planner, server.server)
    endpoint = await server.start()
    console = Console(file=io.StringIO())
    follower = TargetFollower(endpoint, cast("Scaler", scaler), console)
    following = asyncio.create_task(follower.run())
    yield planner, scaler
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await server.stop(None)


async def test_a_target_is_carried_out_and_acknowledged(
    pair: tuple[FakePlanner, FakeScaler],
) -> None:
    planner, scaler = pair
    assert await planner.send("one", (1, 1), (2, 3)) == ""
    assert scaler.running == (2, 3)
    # The same again, as after a lost connection.
    assert await planner.send("one", (1, 1), (2, 3)) == ""
    assert await planner.send("two", (2, 3), (1, 1)) == ""
    assert scaler.running == (1, 1)


async def test_a_target_that_was_decided_from_other_workers_is_refused(
    pair: tuple[FakePlanner, FakeScaler],
) -> None:
    planner, scaler = pair
    scaler.running = (4, 8)
    failure = await planner.send("one", (0, 1), (1, 1))
    assert "decided from 0 P, 1 D, and 4 P, 8 D run here" in failure
    assert scaler.running == (4, 8)


async def test_a_failure_is_reported_and_the_next_target_is_carried_out(
    pair: tuple[FakePlanner, FakeScaler],
) -> None:
    planner, scaler = pair
    scaler.fault = "x" * 2_000
    assert await planner.send("one", (1, 1), (2, 1)) == "x" * 1_000
    scaler.fault = ""
    # A planner that has started again does not know the target of its earlier start.
    planner.forgotten = True
    assert await planner.send("two", (1, 1), (2, 1)) == ""
    planner.forgotten = False
    assert await planner.send("three", (2, 1), (1, 1)) == ""
    assert scaler.running == (1, 1)
