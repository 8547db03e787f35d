"""When a worker sends its status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from headrace.worker.v1 import worker_pb2
from headrace_common.time_model.model import StepTimes, TimeModel
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.steps import EngineSteps, StepWatch
from headrace_engine.worker.status import (
    BUSY_INTERVAL_S,
    POLL_S,
    StatusSignal,
    WatchedStatus,
    WorkerStatusServicer,
)
from headrace_kv.layout import WorkerRef
from tests.local_channel import LocalContext
from tests.virtually import virtually

START_S = 1_000.0


def status_of(
    snapshot: Callable[[], worker_pb2.WatchStatusResponse],
    signal: StatusSignal,
    times: Callable[[], TimeModel] = TimeModel,
) -> WorkerStatusServicer:
    unused: Any = None
    events = PrefixEventPublisher(WorkerRef("w-0", "1"), 16)
    return WorkerStatusServicer(snapshot, events, signal, unused, unused, unused, times)


class Worker:
    """A worker with a number of requests, and what one watcher gets: the number and the time of each message."""

    def __init__(self, max_interval_s: int) -> None:
        self.requests = 0
        self.signal = StatusSignal()
        self.times = TimeModel()
        servicer = status_of(self.snapshot, self.signal, lambda: self.times)
        request = worker_pb2.WatchStatusRequest()
        request.max_interval.FromSeconds(max_interval_s)
        context: Any = LocalContext()
        self.stream: AsyncIterator[worker_pb2.WatchStatusResponse]
        self.stream = aiter(servicer.WatchStatus(request, context))

    def snapshot(self) -> worker_pb2.WatchStatusResponse:
        return worker_pb2.WatchStatusResponse(
            state=worker_pb2.WatchStatusResponse.STATE_SERVING, running_requests=self.requests
        )

    def change(self, requests: int) -> None:
        self.requests = requests
        self.signal.notify()

    async def next(self) -> tuple[int, float]:
        """The next message: its number of requests, and the seconds since the start."""
        message = await anext(self.stream)
        return message.running_requests, round(time.monotonic() - START_S, 6)


@virtually
async def test_status_is_sent_at_once_on_change_and_every_interval() -> None:
    worker = Worker(max_interval_s=20)
    assert await worker.next() == (0, 0.0)
    assert await worker.next() == (0, 20.0)
    asyncio.get_running_loop().call_later(5.0, worker.change, 1)
    assert await worker.next() == (1, 25.0)
    asyncio.get_running_loop().call_later(0.25, worker.change, 0)
    requests, at_s = await worker.next()
    # A busy worker is polled, so that a burst of changes is one message.
    assert requests == 0
    assert 25.25 <= at_s <= 25.25 + POLL_S


@virtually
async def test_a_worker_with_requests_sends_every_second_and_an_idle_one_every_interval() -> None:
    worker = Worker(max_interval_s=60)
    worker.requests = 1
    # Repeated although nothing has changed, so that routers see when the worker stands still.
    times_s = [at_s for _, at_s in [await worker.next() for _ in range(3)]]
    assert times_s == [0.0, BUSY_INTERVAL_S, 2 * BUSY_INTERVAL_S]
    worker.requests = 0
    _, idle_s = await worker.next()
    _, next_s = await worker.next()
    assert next_s - idle_s == 60.0


@virtually
async def test_all_streams_of_a_worker_with_requests_share_one_poll() -> None:
    made = 0

    def snapshot() -> worker_pb2.WatchStatusResponse:
        nonlocal made
        made += 1
        return worker_pb2.WatchStatusResponse(running_requests=1, used_blocks=made // 100)

    servicer, request = status_of(snapshot, StatusSignal()), worker_pb2.WatchStatusRequest()
    context: Any = LocalContext()
    streams = [aiter(servicer.WatchStatus(request, context)) for _ in range(10)]
    for _ in range(3):
        await asyncio.gather(*map(anext, streams))
    seconds = time.monotonic() - START_S
    assert made <= 3 * len(streams) + seconds / POLL_S


@virtually
async def test_a_stall_is_sent_with_its_age_until_the_engine_steps() -> None:
    steps = StepWatch(5.0)
    worker = Worker(60)
    worker.requests = 2
    worker.snapshot = WatchedStatus(worker.snapshot, steps).read  # type: ignore[method-assign]
    servicer = status_of(worker.snapshot, worker.signal)
    context: Any = LocalContext()
    stream = aiter(servicer.WatchStatus(worker_pb2.WatchStatusRequest(), context))
    steps.report(EngineSteps(1, 2, 7, 0.1))

    async def next_status(*, stalled: bool) -> worker_pb2.WatchStatusResponse:
        while True:
            status = await anext(stream)
            if status.HasField("stall") is stalled:
                return status

    for age_s in (5, 6, 7):
        stall = (await next_status(stalled=True)).stall
        assert (stall.age.seconds, stall.bound.seconds) == (age_s, 5)
        assert (stall.request_count, stall.token_count) == (2, 7)
        assert age_s <= time.monotonic() - START_S < age_s + 0.2
    steps.report(EngineSteps(2, 2, 7, 0.1))
    await next_status(stalled=False)
    assert time.monotonic() - START_S < 7.3


def test_the_log_has_the_start_and_the_end_of_a_stall(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    steps = StepWatch(5.0, clock=lambda: now_s[0])
    status = WatchedStatus(lambda: worker_pb2.WatchStatusResponse(worker_id="d0"), steps)
    steps.report(EngineSteps(1, 3, 4, 0.1))
    for _ in range(30):
        now_s[0] += 0.5
        status.read()
    steps.report(EngineSteps(2, 3, 4, 0.1))
    status.read()
    start, end = (record.getMessage() for record in caplog.records)
    assert start.startswith("d0 is stalled: a step of 3 requests and 4 tokens has taken 5.5 s")
    assert end == "d0 steps again, after a stall of 15 s"


@virtually
async def test_the_time_model_travels_along_and_sends_nothing_by_itself() -> None:
    worker = Worker(max_interval_s=20)
    assert (await anext(worker.stream)).times.steps.prompt_steps == 0
    worker.times = TimeModel(StepTimes(fixed_s=0.25, prompt_steps=7))
    message = await anext(worker.stream)
    assert time.monotonic() == pytest.approx(START_S + 20.0)
    assert (message.times.steps.fixed_s, message.times.steps.prompt_steps) == (0.25, 7)
