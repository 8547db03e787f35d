"""The load of a decode worker: its running sums equal sums over the reservations after any sequence of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.worker.v1 import worker_pb2
from headrace_kv.layout import WorkerRef
from headrace_router.workers.connection import LoadReservation, WorkerConnection
from headrace_router.workers.dials import Dials
from headrace_router.workers.table import Load, Worker
from headrace_simulator.virtual_time import run_virtually
from tests.local_channel import ScriptedCalls
from tests.sim_layout import LAYOUT
from tests.waiting import until

_WORKER = Worker(WorkerRef("d0", "a"), "127.0.0.1:1", "sim", 4_096, 8, LAYOUT)

_EVENTS = st.one_of(
    st.tuples(st.just("reserve"), st.integers(0, 10_000), st.just(0)),
    # A release may repeat.
    st.tuples(st.just("release"), st.integers(0, 60), st.just(0)),
    st.tuples(st.just("status"), st.integers(0, 20), st.integers(0, 200)),
    st.tuples(st.just("lost"), st.just(0), st.just(0)),
)


class _Naive:
    """The same load, from sums over all reservations. Each is its tokens and whether a status has come since."""

    def __init__(self) -> None:
        self.reservations: dict[LoadReservation, tuple[int, bool]] = {}
        self.reported = (0, 0)
        self.external = 0

    def on_status(self, requests: int, blocks: int) -> None:
        self.reported = (requests, blocks)
        self.external = max(0, requests - len(self.reservations))
        for reservation, (tokens, _) in tuple(self.reservations.items()):
            self.reservations[reservation] = (tokens, True)

    def load(self) -> tuple[int, int]:
        requests, blocks = self.reported
        new = [tokens for tokens, reported in self.reservations.values() if not reported]
        return (
            max(requests + len(new), len(self.reservations)),
            max(
                blocks * LAYOUT.block_tokens + sum(new),
                sum(tokens for tokens, _ in self.reservations.values()),
            ),
        )


async def _check(events: list[tuple[str, int, int]]) -> None:
    changes: list[Any] = []
    connection = WorkerConnection(
        _WORKER, grpc.aio.insecure_channel, Dials(), changes.append, changes.append, b""
    )
    made: list[LoadReservation] = []
    naive = _Naive()
    try:
        for kind, number, blocks in events:
            if kind == "reserve":
                made.append(connection.reserve(number, routed=True))
                naive.reservations[made[-1]] = (number, False)
            elif kind == "release" and made:
                reservation = made[number % len(made)]
                reservation.release()
                naive.reservations.pop(reservation, None)
            elif kind == "status":
                status = worker_pb2.WatchStatusResponse(
                    running_requests=number, reserved_blocks=blocks
                )
                connection._set_status(status)
                naive.on_status(number, blocks)
            elif kind == "lost":
                connection._set_status(None)
                naive.reported = (0, 0)
            load = connection.load()
            assert (load.requests, load.held_tokens) == naive.load()
            # Between two statuses, own requests do not change it.
            assert load.external_requests == naive.external
    finally:
        await connection.close()


@settings(max_examples=200, deadline=None)
@given(st.lists(_EVENTS, max_size=60))
def test_running_sums_equal_sums_over_the_reservations(
    events: list[tuple[str, int, int]],
) -> None:
    run_virtually(lambda: _check(events))


class _SlowWorker(ScriptedCalls):
    """A channel to a worker that sends one idle status on each stream, and then nothing."""

    def __init__(self) -> None:
        self.requests: list[worker_pb2.WatchStatusRequest] = []
        self.silence = asyncio.Event()
        self.sent = False
        self.answers = True

    def called(self, request: worker_pb2.WatchStatusRequest) -> Any:
        self.requests.append(request)
        self.sent = False
        return self

    async def read(self) -> worker_pb2.WatchStatusResponse:
        if self.sent:
            await self.silence.wait()
            self.silence.clear()
        while not self.answers:
            await asyncio.sleep(0.1)
        self.sent = True
        return worker_pb2.WatchStatusResponse(incarnation=_WORKER.ref.incarnation)


@asynccontextmanager
async def _idle_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[WorkerConnection, _SlowWorker]]:
    """A worker that need not send for a minute. One with requests would have 0.05 s."""
    monkeypatch.setattr("headrace_router.workers.connection._STATUS_TIMEOUT_S", 0.05)
    channel: Any = _SlowWorker()
    connection = WorkerConnection(
        _WORKER, lambda _: channel, Dials(), lambda _: None, lambda _: None, b"", 60.0
    )
    await until(lambda: connection.load().reachable)
    yield connection, channel
    await connection.close()


async def test_an_idle_worker_may_be_silent_until_a_request_is_routed_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _idle_worker(monkeypatch) as (connection, channel):
        assert channel.requests[0].max_interval.seconds == 60
        direct = connection.reserve(1, routed=False)
        connection.reserve(1, routed=True).release()
        await asyncio.sleep(0.2)
        assert connection.load().reachable
        connection.reserve(1, routed=True)
        await until(lambda: not connection.load().reachable)
        direct.release()


async def test_an_unreachable_worker_is_asked_again_long_before_its_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _idle_worker(monkeypatch) as (connection, channel):
        connection.mark_unreachable()
        assert not connection.load().reachable
        await until(lambda: connection.load().reachable)
        assert len(channel.requests) == 2


async def test_another_interval_takes_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _idle_worker(monkeypatch) as (connection, channel):
        connection.registered(connection.worker, 40.0)
        channel.silence.set()
        await until(lambda: not channel.silence.is_set())
        assert len(channel.requests) == 1
        connection.registered(connection.worker, 20.0)
        channel.silence.set()
        await until(lambda: len(channel.requests) == 2)
        assert channel.requests[1].max_interval.seconds == 20
        assert connection.load().reachable


async def test_a_worker_with_requests_is_stuck_when_no_status_comes_for_the_ping_timeout_and_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _idle_worker(monkeypatch) as (connection, channel):
        await asyncio.sleep(100.0)
        assert not connection.stuck
        channel.answers = False
        start_s = asyncio.get_running_loop().time()
        connection.reserve(1, routed=True)
        await until(lambda: bool(connection.stuck))
        assert 6.0 <= asyncio.get_running_loop().time() - start_s < 6.1
        assert connection.load().stalled
        channel.answers = True
        await until(lambda: connection.load().reachable)
        assert not connection.stuck


async def test_a_worker_that_reports_a_stall_is_not_reachable() -> None:
    connection = WorkerConnection(
        _WORKER, grpc.aio.insecure_channel, Dials(), lambda _: None, lambda _: None, b""
    )
    try:
        connection._set_status(worker_pb2.WatchStatusResponse(stall=worker_pb2.Stall()))
        assert connection.load() == Load(reachable=False, stalled=True)
        connection._set_status(None)
        assert connection.stuck
        connection._set_status(worker_pb2.WatchStatusResponse())
        assert connection.load() == Load()
    finally:
        await connection.close()
