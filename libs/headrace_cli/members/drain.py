"""Drains a worker by its id, over the drain RPC."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
import grpc.aio
from rich.console import Console

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_cli.client import CALL_TIMEOUT_S, call_channel, list_members, rpc_errors
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import DeadlineExceeded, NotFound
from headrace_common.rpc.server import DRAIN_OVERRUN_MAX_S

_WORKERS: Final = (registry_pb2.Member.ROLE_PREFILL, registry_pb2.Member.ROLE_DECODE)
# After its last request a process still stops its engine.
_ENGINE_STOP_S: Final = 10.0


async def drain_worker(
    registry: str, worker_id: str, grace_s: float | None, *, wait: bool, console: Console | None
) -> worker_pb2.DrainResponse:
    """Drains a worker. With `wait`, returns when it has ended. Shows its steps on `console`.

    Raises NotFound for an id that no worker has, DeadlineExceeded when it does not end.
    """
    member = await _find(registry, worker_id)
    async with call_channel(member.endpoint) as channel:
        request = worker_pb2.DrainRequest(incarnation=member.incarnation)
        if grace_s is not None:
            request.grace.CopyFrom(duration_from_seconds(grace_s))
        with rpc_errors(f"worker {worker_id} on {member.endpoint}"):
            begun = await worker_pb2_grpc.WorkerServiceStub(channel).Drain(
                request, timeout=CALL_TIMEOUT_S
            )
        remaining_s = seconds_from_duration(begun.remaining)
        if console is not None:
            console.print(
                f"{worker_id} drains: {begun.request_count} requests in flight, up to {remaining_s:.0f} s"
            )
        if wait:
            await _wait_gone(channel, worker_id, remaining_s + DRAIN_OVERRUN_MAX_S + _ENGINE_STOP_S)
            if console is not None:
                console.print(f"{worker_id} has ended")
    return begun


async def _find(registry: str, worker_id: str) -> registry_pb2.Member:
    workers = {
        member.worker_id: member
        for member in await list_members(registry)
        if member.role in _WORKERS
    }
    if worker_id not in workers:
        known = ", ".join(sorted(workers)) or "none"
        raise NotFound(
            f"no worker is registered as {worker_id}; there are: {known}",
            metadata={"worker_id": worker_id},
        )
    return workers[worker_id]


async def _wait_gone(channel: grpc.aio.Channel, worker_id: str, timeout_s: float) -> None:
    """Waits until the worker's port is closed. Its status stream ends a moment earlier."""
    deadline = Deadline.after(timeout_s)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    while True:
        try:
            async for _ in stub.WatchStatus(
                worker_pb2.WatchStatusRequest(), timeout=deadline.remaining_s()
            ):
                pass
        except grpc.aio.AioRpcError as error:
            if deadline.expired:
                raise DeadlineExceeded(
                    f"{worker_id} has not ended within {timeout_s:.0f} s",
                    metadata={"worker_id": worker_id},
                ) from error
            if error.code() is grpc.StatusCode.UNAVAILABLE and "DRAINING" not in str(
                error.trailing_metadata()
            ):
                return
        await asyncio.sleep(0.1)
