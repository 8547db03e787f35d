"""The observer reads routers and workers over gRPC, and reports nothing while one of them is silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.inference.v1 import load_pb2, load_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.config import ServiceConfig
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import WorkerGone
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_planner.observation import WorkerCounts
from headrace_planner_service.config import PlannerConfig
from headrace_planner_service.observer import Observer
from tests.waiting import until

STATES = worker_pb2.WatchStatusResponse
ROLES = registry_pb2.Member
MODEL = "sim"


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker without the RPCs that the planner may not call."""

    SubscribeKvEvents = ResetPrefixCache = Drain = ChangeAdapter = None  # type: ignore[assignment]


class Everything(load_pb2_grpc.LoadServiceServicer, Worker):
    """Answers as a router and as a worker."""

    RecordLoad = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.status = STATES(
            incarnation="1", state=STATES.STATE_SERVING, running_requests=3, total_blocks=8
        )
        steps = self.status.times.steps
        steps.s_per_prompt_token, steps.prompt_steps, steps.answer_steps = 1e-4, 9, 9
        self.watches = 0
        self.intervals_s: list[float] = []
        self.silent = asyncio.Event()
        self.more = asyncio.Event()

    async def GetLoad(
        self, request: load_pb2.GetLoadRequest, context: Any
    ) -> load_pb2.GetLoadResponse:
        totals = load_pb2.RequestTotals(request_count=7)
        other = load_pb2.ModelLoad(model="other", queued_prompts=100)
        own = load_pb2.ModelLoad(model=MODEL, queued_prompts=2, answered=totals)
        return load_pb2.GetLoadResponse(models=[own, other])

    async def WatchStatus(
        self, request: worker_pb2.WatchStatusRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchStatusResponse]:
        self.watches += 1
        self.intervals_s.append(seconds_from_duration(request.max_interval))
        yield self.status
        silent = self.silent
        waits = [asyncio.ensure_future(one.wait()) for one in (silent, self.more)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not silent.is_set():
                yield self.status
                await silent.wait()
        finally:
            for wait in waits:
                wait.cancel()


def member(
    name: str, role: ROLES.Role.ValueType, endpoint: str, model: str = MODEL
) -> registry_pb2.Member:
    return registry_pb2.Member(
        worker_id=name,
        incarnation="1",
        role=role,
        endpoint=endpoint,
        model="" if role == ROLES.ROLE_ROUTER else model,
        max_num_seqs=4,
    )


@pytest.fixture
async def peer() -> AsyncIterator[tuple[Everything, str]]:
    config = ServiceConfig(internal_listen="127.0.0.1:0")
    services = ("headrace.inference.v1.LoadService", "headrace.worker.v1.WorkerService")
    server = GrpcServer(config, services)
    servicer = Everything()
    load_pb2_grpc.add_LoadServiceServicer_to_server(servicer, server.server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    endpoint = await server.start()
    yield servicer, endpoint
    servicer.silent.set()
    await server.stop(None)


@pytest.fixture
async def observer() -> AsyncIterator[Observer]:
    config = PlannerConfig.model_validate({"model": MODEL})
    observer = Observer(MODEL, lambda endpoint: open_channel(endpoint, config))
    yield observer
    await observer.close()


async def complete(observer: Observer) -> bool:
    try:
        await observer.read()
    except WorkerGone:
        return False
    return True


async def test_a_reading_has_the_load_of_one_model(
    peer: tuple[Everything, str], observer: Observer
) -> None:
    _, endpoint = peer
    members = [
        member("router", ROLES.ROLE_ROUTER, endpoint),
        member("prefill-0", ROLES.ROLE_PREFILL, endpoint),
        member("decode-0", ROLES.ROLE_DECODE, endpoint),
        member("stranger", ROLES.ROLE_DECODE, "127.0.0.1:1", "other"),
    ]
    observer.update(members)
    await until(lambda: complete(observer), 20.0, "a complete reading")
    reading = await observer.read()
    assert (reading.sample.prefill_workers, reading.sample.queued_prompts) == (1, 2)
    assert [worker.load for worker in reading.sample.decode] == [0.75]
    assert [totals.request_count for totals in reading.totals.values()] == [7]
    assert reading.profile is not None
    assert (reading.profile.prompt_s(1_000), reading.profile.max_num_seqs) == (0.1, 4)
    observer.update(members[:2])
    assert (await observer.read()).sample.counts == WorkerCounts(1, 0)


async def test_a_worker_of_both_roles_is_counted_as_such(
    peer: tuple[Everything, str], observer: Observer
) -> None:
    servicer, endpoint = peer
    members = [
        member("router", ROLES.ROLE_ROUTER, endpoint),
        member("worker-0", ROLES.ROLE_BOTH, endpoint),
    ]
    observer.update(members)
    await until(lambda: complete(observer), 20.0, "a complete reading")
    assert (await observer.read()).sample.counts == WorkerCounts(0, 0, 1)
    servicer.status.state = STATES.STATE_DRAINING
    servicer.more.set()

    async def none_left() -> bool:
        return (await observer.read()).sample.counts == WorkerCounts(0, 0)

    await until(none_left, 20.0, "a drain")


async def test_nothing_is_read_before_a_worker_has_served(
    peer: tuple[Everything, str], observer: Observer
) -> None:
    _, endpoint = peer
    observer.update([member("router", ROLES.ROLE_ROUTER, endpoint)])
    with pytest.raises(WorkerGone, match="no worker that generates has served sim yet"):
        await observer.read()


async def test_a_silent_worker_is_named_and_after_a_while_not_counted(
    peer: tuple[Everything, str], observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, endpoint = peer
    router = member("router", ROLES.ROLE_ROUTER, endpoint)
    observer.update([router, member("decode-0", ROLES.ROLE_DECODE, endpoint)])
    await until(lambda: complete(observer), 20.0, "a complete reading")
    servicer.status = STATES(incarnation="another")
    servicer.silent.set()
    servicer.silent = asyncio.Event()

    async def incomplete() -> bool:
        return not await complete(observer)

    await until(incomplete, 20.0, "an incomplete reading")
    with pytest.raises(WorkerGone, match="decode-0 sends no status"):
        await observer.read()
    # The observer asks again.
    await until(lambda: servicer.watches > 1, 20.0, "another watch")
    monkeypatch.setattr(f"{Observer.__module__}.SILENT_S", 0.0)
    assert (await observer.read()).sample.counts == WorkerCounts(0, 0)
