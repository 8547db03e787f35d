"""The gRPC side of the prefill queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace_common.errors import ProtocolViolation
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.layout.proto import layout_from_proto
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import PrefillWorkerStream

_HELLO_TIMEOUT_S = 10.0


class PullService(prefill_pb2_grpc.PrefillQueueServiceServicer):
    """One stream per prefill worker; a worker is in the queue's eyes for as long as its stream lasts."""

    def __init__(self, queue: PrefillQueue) -> None:
        self._queue = queue

    async def Pull(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[prefill_pb2.PullRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Hands out tasks until the worker's stream ends."""
        hello = await _read_hello(request_iterator)
        ref = WorkerRef(hello.worker_id, hello.incarnation)
        puller = self._queue.join(ref, hello.model, layout_from_proto(hello.layout))
        writer = asyncio.create_task(_write(puller, context))
        try:
            async for request in request_iterator:
                self._handle(puller, request)
        finally:
            self._queue.leave(puller)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _handle(self, puller: PrefillWorkerStream, request: prefill_pb2.PullRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "credit":
            self._queue.add_credits(puller, request.credit.task_count)
        elif kind == "started":
            self._queue.start(puller, request.started.transfer_id)
        elif kind == "first_token":
            self._queue.first_token(puller, request.first_token)
        elif kind == "done":
            self._queue.finish(puller, request.done)
        else:
            raise ProtocolViolation(
                f"{puller.ref} sent {kind or 'nothing'} where Credit, TaskStarted, FirstToken or "
                "TaskDone may come"
            )


async def _read_hello(requests: AsyncIterator[prefill_pb2.PullRequest]) -> prefill_pb2.Hello:
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await anext(requests, None)
    except TimeoutError:
        raise ProtocolViolation(f"no Hello came within {_HELLO_TIMEOUT_S:g} s") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise ProtocolViolation("the first request of a Pull must be a Hello")
    if not (first.hello.worker_id and first.hello.incarnation and first.hello.HasField("layout")):
        raise ProtocolViolation("a Hello must name worker_id, incarnation and layout")
    return first.hello


async def _write(puller: PrefillWorkerStream, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    while True:
        await context.write(await puller.outbox.get())
