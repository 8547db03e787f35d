"""The scaler over workloads of memory: order, waits, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from headrace_common.errors import (
    Conflict,
    DeadlineExceeded,
    Draining,
    PermissionDenied,
    WorkerGone,
)
from headrace_planner.observation import PlannedRole, WorkerCounts
from headrace_planner_service.config import Workload, WorkloadState
from headrace_planner_service.kubernetes_connector import (
    KubernetesConnector,
    WorkloadScaler,
)
from headrace_planner_service.steering import TargetBoard
from tests.waiting import until

P, D = Workload("statefulset", "p"), Workload("statefulset", "d")
LIMIT_S = 20.0
SHORT_S = 0.05


@dataclass
class FakeApi:
    """Two workloads. `obedient` ones start and end their pods at once."""

    states: dict[Workload, WorkloadState]
    obedient: set[Workload] = field(default_factory=lambda: {P, D})
    calls: list[tuple[Workload, int]] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)

    async def read(self, workload: Workload) -> WorkloadState:
        if self.faults:
            raise self.faults.pop(0)
        return self.states[workload]

    async def scale(self, workload: Workload, count: int, expected: int) -> None:
        if self.states[workload].wanted != expected:
            raise Conflict("another number")
        self.calls.append((workload, count))
        self.states[workload] = replace(self.states[workload], wanted=count, is_current=False)
        if workload in self.obedient:
            self.obey(workload)

    def obey(self, workload: Workload) -> None:
        count = self.states[workload].wanted
        self.states[workload] = WorkloadState(count, count, count, is_current=True)


def api(prefill: int, decode: int) -> FakeApi:
    counts = ((P, prefill), (D, decode))
    return FakeApi({one: WorkloadState(n, n, n, is_current=True) for one, n in counts})


def scaler(fake: FakeApi, timeout_s: float = LIMIT_S) -> WorkloadScaler:
    workloads = {PlannedRole.PREFILL: P, PlannedRole.DECODE: D}
    return WorkloadScaler(cast("Any", fake), workloads, poll_s=0.001, timeout_s=timeout_s)


@asynccontextmanager
async def applying(fake: FakeApi, wanted: WorkerCounts) -> AsyncIterator[asyncio.Task[None]]:
    """The change from what runs, while it goes on."""
    current = WorkerCounts(fake.states[P].wanted, fake.states[D].wanted)
    task = asyncio.create_task(scaler(fake).apply(current, wanted))
    yield task
    await asyncio.wait_for(task, LIMIT_S)


async def test_a_target_from_another_view_is_refused() -> None:
    fake = api(4, 8)
    with pytest.raises(Conflict, match="decided from 1 P, 1 D, and 4 P, 8 D run here"):
        await scaler(fake).apply(WorkerCounts(1, 1), WorkerCounts(2, 1))
    with pytest.raises(Conflict, match="no workload has workers of both roles"):
        await scaler(fake).apply(WorkerCounts(0, 0, 2), WorkerCounts(0, 0, 3))
    assert fake.calls == []


async def test_workers_that_do_not_serve_in_time_are_given_up() -> None:
    fake = api(1, 1)
    fake.obedient = {P}
    with pytest.raises(DeadlineExceeded, match="statefulset/d has 1 pods, 1 ready, of 3"):
        await scaler(fake, SHORT_S).apply(WorkerCounts(1, 1), WorkerCounts(2, 3))
    # Both numbers are as before, so nothing waits for devices.
    assert fake.calls == [(P, 2), (D, 3), (P, 1), (D, 1)]


async def test_workers_that_do_not_end_in_time_are_reported_and_nothing_is_added() -> None:
    fake = api(1, 3)
    fake.obedient = set()
    with pytest.raises(DeadlineExceeded, match="removed workers did not end within"):
        await scaler(fake, SHORT_S).apply(WorkerCounts(1, 3), WorkerCounts(2, 2))
    assert fake.calls == [(D, 2)]


async def test_an_api_that_is_away_for_a_while_delays_a_change() -> None:
    fake = api(1, 1)
    fake.obedient = set()
    async with applying(fake, WorkerCounts(2, 1)):
        await until(lambda: bool(fake.calls), LIMIT_S)
        fake.faults = [WorkerGone("no answer"), WorkerGone("no answer")]
        await until(lambda: not fake.faults, LIMIT_S)
        fake.obey(P)


async def test_the_connector_acknowledges_each_target_with_its_failure() -> None:
    fake, board = api(1, 1), TargetBoard("p")
    acknowledged: list[tuple[str, str]] = []
    connector = KubernetesConnector(
        board, scaler(fake), lambda target, failure: acknowledged.append((target, failure))
    )
    running = asyncio.create_task(connector.run())
    board.publish(1, WorkerCounts(1, 1), WorkerCounts(2, 1), 0.0)
    await until(lambda: len(acknowledged) == 1, LIMIT_S)
    board.publish(2, WorkerCounts(1, 0), WorkerCounts(3, 0), 0.0)
    await until(lambda: len(acknowledged) == 2, LIMIT_S)
    fake.faults = [PermissionDenied("x" * 2_000)]
    board.publish(3, WorkerCounts(2, 1), WorkerCounts(2, 2), 0.0)
    await until(lambda: len(acknowledged) == 3, LIMIT_S)
    assert acknowledged[0] == ("p-1", "")
    assert acknowledged[1][1].startswith("it was decided from 1 P, 0 D")
    assert len(acknowledged[2][1]) == 1_000
    assert fake.calls == [(P, 2)]
    board.close()
    (result,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(cast("Draining", result), Draining)
