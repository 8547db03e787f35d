"""The load of a decode worker: its running sums equal sums over the reservations after any sequence of events."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.worker.v1 import worker_pb2
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_router.workers.connection import LoadReservation, WorkerConnection
from headrace_router.workers.dials import Dials
from headrace_router.workers.table import Worker

_BLOCK_TOKENS = 16
_LAYOUT = KvLayout.attention(
    model="sim",
    dtype="float32",
    layer_count=4,
    kv_head_count=2,
    block_tokens=_BLOCK_TOKENS,
    parts={"kv": 64},
)
_WORKER = Worker(WorkerRef("d0", "a"), "127.0.0.1:1", "sim", 4_096, 8, _LAYOUT)

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
                blocks * _BLOCK_TOKENS + sum(new),
                sum(tokens for tokens, _ in self.reservations.values()),
            ),
        )


async def _check(events: list[tuple[str, int, int]]) -> None:
    changes: list[Any] = []
    connection = WorkerConnection(_WORKER, grpc.aio.insecure_channel, Dials(), changes.append, b"")
    made: list[LoadReservation] = []
    naive = _Naive()
    try:
        for kind, number, blocks in events:
            if kind == "reserve":
                made.append(connection.reserve(number))
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
    asyncio.run(_check(events))


async def test_a_worker_accepts_tickets_while_it_reports_and_its_clock_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = WorkerConnection(_WORKER, grpc.aio.insecure_channel, Dials(), lambda _: None, b"")

    def accepts() -> bool:
        return connection.accepts_tickets

    try:
        assert not accepts(), "the worker has not reported"
        connection._set_status(worker_pb2.WatchStatusResponse())
        assert not accepts(), "it has not sent its time"
        now_ns = time.monotonic_ns()
        connection.clock.answered(now_ns, request_ns=now_ns, received_ns=now_ns)
        assert accepts()
        forward = worker_pb2.WatchStatusResponse(sent_unix_ns=time.monotonic_ns() + 5 * 10**9)
        connection._read_clock(forward, None)
        assert not accepts(), "its clock was set forward"
        assert "set forward by 5" in caplog.text
        connection._no_tickets_until_s = 0.0
        assert accepts()
        connection._set_status(None)
        assert not accepts(), "it may have forgotten the key"
    finally:
        await connection.close()
