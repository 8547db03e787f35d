"""`headrace drain`: takes a worker out of service without failing a request."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from rich.console import Console

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_cli.client import CALL_TIMEOUT_S, call_channel, list_members, rpc_errors
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import DeadlineExceeded, NotFound
from headrace_common.rpc.server import END_UNFINISHED_S

WORKERS = (registry_pb2.Member.ROLE_PREFILL, registry_pb2.Member.ROLE_DECODE)
# A process that holds nothing any more still has to end its engine.
_END_S = 10.0


async def drain_worker(
    registry: str, worker_id: str, grace_s: float | None, *, wait: bool, console: Console
) -> None:
    """Tells a worker to drain; with `wait`, returns once it is gone.

    Raises NotFound for an id that no worker has, and DeadlineExceeded when it does not go.
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
        console.print(
            f"{worker_id} drains: {begun.request_count} requests in flight, up to {remaining_s:.0f} s"
        )
        if wait:
            await _wait_gone(channel, worker_id, remaining_s + END_UNFINISHED_S + _END_S)
            console.print(f"{worker_id} has ended")


async def _find(registry: str, worker_id: str) -> registry_pb2.Member:
    workers = {
        member.worker_id: member
        for member in await list_members(registry)
        if member.role in WORKERS
    }
    if worker_id not in workers:
        known = ", ".join(sorted(workers)) or "none"
        raise NotFound(
            f"no worker is registered as {worker_id}; there are: {known}",
            metadata={"worker_id": worker_id},
        )
    return workers[worker_id]


async def _wait_gone(channel: grpc.aio.Channel, worker_id: str, timeout_s: float) -> None:
    """Until nobody listens any more: the status stream is cut a moment before."""
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
