"""Knows which RPCs a server is answering, so that it can end without cutting one off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio

from headrace_common.deadlines import Deadline
from headrace_common.errors import Draining
from headrace_common.rpc import handlers
from headrace_common.rpc.handlers import Context, guarded

# Streams that last as long as both ends do. Waiting for them would always use up the grace.
_ENDLESS = frozenset(
    {
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/headrace.registry.v1.RegistryService/KeepAlive",
        "/headrace.registry.v1.RegistryService/Watch",
        "/headrace.worker.v1.WorkerService/SubscribeKvEvents",
        "/headrace.worker.v1.WorkerService/WatchStatus",
        "/headrace.prefill.v1.PrefillQueueService/Pull",
        "/headrace.kv.v1.HandoffService/Handoff",
    }
)


class InFlightInterceptor(grpc.aio.ServerInterceptor):
    """Counts the RPCs that end by themselves and holds on to those that do not."""

    def __init__(self) -> None:
        self._answering: set[asyncio.Task[Any]] = set()
        self._streams: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._cutting = False

    @property
    def answer_count(self) -> int:
        """RPCs being answered that will end by themselves."""
        return len(self._answering)

    async def intercept_service(
        self,
        continuation: handlers.Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> handlers.Handler | None:
        """Wraps the handler found by `continuation`."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        endless = handler_call_details.method in _ENDLESS
        return guarded(handler, self._stream if endless else self._answer)

    async def wait_answered(self, deadline: Deadline) -> bool:
        """Waits until no RPC is being answered; False once the deadline has passed."""
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cut(self) -> None:
        """Ends every RPC with Draining, streams that still come included."""
        self._cutting = True
        for task in self._streams | self._answering:
            task.cancel()

    @asynccontextmanager
    async def _answer(self, context: Context) -> AsyncIterator[None]:
        task = _current_task()
        self._answering.add(task)
        self._idle.clear()
        try:
            with self._cuttable(task):
                yield
        finally:
            self._answering.discard(task)
            if not self._answering:
                self._idle.set()

    @asynccontextmanager
    async def _stream(self, context: Context) -> AsyncIterator[None]:
        task = _current_task()
        self._streams.add(task)
        try:
            with self._cuttable(task):
                yield
        finally:
            self._streams.discard(task)

    @contextmanager
    def _cuttable(self, task: asyncio.Task[Any]) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            if not self._cutting:
                raise
            task.uncancel()
            raise Draining("the process is shutting down") from None


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "grpc.aio runs every handler in a task"
    return task
