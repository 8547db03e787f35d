"""The gRPC side of the prefill queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc.aio

from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace_common.access.roles import require_own_name
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import InvalidRequest, ProtocolViolation, WorkerGone
from headrace_common.registry.adapters import adapters_from_proto, announced_violations
from headrace_common.rpc.channel import ping_timeout_s
from headrace_common.tasks import wait_silent
from headrace_kv.layout import WorkerRef, layout_from_proto
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream

_HELLO_TIMEOUT_S = 10.0


HandOver: TypeAlias = Callable[
    [prefill_pb2.EnqueueRequest, float | None], Awaitable[prefill_pb2.EnqueueResponse]
]
"""Queues a prompt of a decode worker's own request, and returns once its KV cache was handed over."""


class QueueService(prefill_pb2_grpc.PrefillQueueServiceServicer):
    """Serves one stream for each prefill worker. A worker is in the queue while its stream is open.

    `prompts` queues the prompts of decode workers. `reject_when_draining` raises Draining.
    """

    def __init__(
        self, queue: PrefillQueue, hand_over: HandOver, reject_when_draining: Callable[[], None]
    ) -> None:
        self._queue = queue
        self._hand_over = hand_over
        self._reject_when_draining = reject_when_draining

    async def Pull(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[prefill_pb2.PullRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Sends tasks until the worker's stream ends."""
        hello = await _read_hello(request_iterator)
        require_own_name(hello.worker_id)
        ref = WorkerRef(hello.worker_id, hello.incarnation)
        stream = self._queue.add_worker(
            ref,
            hello.model,
            layout_from_proto(hello.layout),
            adapters_from_proto(hello.adapters),
        )
        tasks = [
            asyncio.create_task(self._read(stream, request_iterator)),
            asyncio.create_task(_write(stream, context)),
        ]
        if hello.HasField("max_interval"):
            limit_s = seconds_from_duration(hello.max_interval) + ping_timeout_s()
            tasks.append(asyncio.create_task(_reject_silence(stream, limit_s)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._queue.remove_worker(stream)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self, stream: PrefillWorkerStream, requests: AsyncIterator[prefill_pb2.PullRequest]
    ) -> None:
        async for request in requests:
            stream.received_message()
            for each in unpacked(request):
                self._handle(stream, each)

    async def Enqueue(
        self,
        request: prefill_pb2.EnqueueRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> prefill_pb2.EnqueueResponse:
        """Queues the prompt of a decode worker's own request. See prefill.proto."""
        require_own_name(request.worker_id)
        self._reject_when_draining()
        return await self._hand_over(request, context.time_remaining())

    def _handle(self, stream: PrefillWorkerStream, request: prefill_pb2.PullRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "credit":
            self._queue.add_credits(stream, request.credit.task_count)
        elif kind == "started":
            self._queue.task_started(stream, request.started.transfer_id)
        elif kind == "first_token":
            self._queue.first_token_made(stream, request.first_token)
        elif kind == "done":
            self._queue.task_ended(stream, request.done)
        else:
            raise ProtocolViolation(
                f"{stream.ref} sent {kind or 'nothing'} where Credit, TaskStarted, FirstToken or "
                "TaskDone is expected"
            )


def unpacked(request: prefill_pb2.PullRequest) -> Sequence[prefill_pb2.PullRequest]:
    """The messages of a batch, or the message itself."""
    return request.batch.requests if request.HasField("batch") else (request,)


async def _read_hello(requests: AsyncIterator[prefill_pb2.PullRequest]) -> prefill_pb2.Hello:
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await anext(requests, None)
    except TimeoutError:
        raise ProtocolViolation(f"no Hello arrived within {_HELLO_TIMEOUT_S:g} s") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise ProtocolViolation("the first request of a Pull must be a Hello")
    if not (first.hello.worker_id and first.hello.incarnation and first.hello.HasField("layout")):
        raise ProtocolViolation("a Hello must name worker_id, incarnation and layout")
    violations = announced_violations(first.hello.adapters, "adapters")
    if violations:
        raise InvalidRequest(violations)
    return first.hello


async def _reject_silence(stream: PrefillWorkerStream, limit_s: float) -> None:
    """Raises WorkerGone once the worker has tasks and has sent nothing for `limit_s`."""
    silent_s = await wait_silent(stream.silent_since_s, limit_s)
    raise WorkerGone(
        f"prefill worker {stream.ref} is stuck: it has sent nothing for {silent_s:.1f} s",
        metadata={"worker_id": stream.ref.worker_id},
    )


async def _write(stream: PrefillWorkerStream, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    while True:
        await context.write(await stream.outbox.get())
