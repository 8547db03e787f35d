"""Follows the status of one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.durations import duration_from_seconds
from headrace_common.process.heartbeats import heartbeat_interval_s, must_change
from headrace_common.tasks import end_task, run_forever

OpenChannel = Callable[[str], grpc.aio.Channel]

_SHORTEST_S: Final = 5.0
_LATE_S: Final = 3.0
_RETRY_FIRST_S: Final = 0.2
_RETRY_MAX_S: Final = 5.0


def status_interval_s(workers: int) -> float:
    """In this time an idle worker sends at least once, if it is one of `workers`. Others send each change."""
    return max(_SHORTEST_S, heartbeat_interval_s(workers))


class WorkerStatus:
    """The latest status of one worker incarnation, from the start of the object to `close`."""

    def __init__(
        self, member: registry_pb2.Member, open_channel: OpenChannel, interval_s: float
    ) -> None:
        """An idle worker sends at least every `interval_s`."""
        self.member = member
        self._interval_s = interval_s
        self._open_channel = open_channel
        self._latest: worker_pb2.WatchStatusResponse | None = None
        self._task = run_forever(self._follow(), f"status-{member.worker_id}")

    @property
    def latest(self) -> worker_pb2.WatchStatusResponse | None:
        """The latest status. None while the worker sends none."""
        return self._latest

    def set_interval(self, interval_s: float) -> None:
        """Asks for another interval after the next status, if the difference is worth a new stream."""
        self._interval_s = interval_s

    async def close(self) -> None:
        """Ends the stream."""
        await end_task(self._task)

    async def _follow(self) -> None:
        delay_s = _RETRY_FIRST_S
        while True:
            channel = self._open_channel(self.member.endpoint)
            try:
                while await self._read(channel):
                    pass
                if self._latest is not None:
                    delay_s = _RETRY_FIRST_S
            finally:
                self._latest = None
                await channel.close()
            await asyncio.sleep(delay_s)
            delay_s = min(_RETRY_MAX_S, 2 * delay_s)

    async def _read(self, channel: grpc.aio.Channel) -> bool:
        """Reads until the stream ends or is late. Returns whether it is to be opened again with another interval."""
        interval_s = self._interval_s
        request = worker_pb2.WatchStatusRequest(max_interval=duration_from_seconds(interval_s))
        call: Any = worker_pb2_grpc.WorkerServiceStub(channel).WatchStatus(request)
        try:
            while True:
                async with asyncio.timeout(interval_s + _LATE_S):
                    status = await call.read()
                if not isinstance(status, worker_pb2.WatchStatusResponse):
                    return False
                if status.incarnation == self.member.incarnation:
                    self._latest = status
                    if must_change(interval_s, self._interval_s):
                        return True
        except (TimeoutError, grpc.aio.AioRpcError):
            return False
        finally:
            call.cancel()
